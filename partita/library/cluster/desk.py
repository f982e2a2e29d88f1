"""Blocks of rows between the driver, which reads them, and the workers, which answer them.

Ray Data is given numbers alone, one for each block, and hands a number to a worker that has room. The worker asks here
for the rows that are its number's: the next ones that were read, or those that it had before when another worker was
lost with it. So of a long file only what is about to be answered is in memory, and rows are let go when their answers
are kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence


class Desk:
    """Blocks that were read and not answered. Its methods are called from other processes, and wait in one loop."""

    def __init__(self, ahead: int) -> None:
        """`ahead`: blocks that may lie here before somebody asks for them."""
        self._ahead = ahead
        self._read: deque[Sequence[str]] = deque()
        self._given: dict[int, Sequence[str]] = {}
        self._kept: set[int] = set()
        self._closed = False
        lock = asyncio.Lock()
        self._more, self._room = asyncio.Condition(lock), asyncio.Condition(lock)

    async def put(self, rows: Sequence[str]) -> None:
        """Lay down a block; back when there is room for another one, or nobody wants any."""
        async with self._room:
            self._read.append(rows)
            self._more.notify()
            await self._room.wait_for(lambda: self._closed or len(self._read) < self._ahead)

    async def close(self) -> None:
        """No block comes after those that lie here: who asks then is given none."""
        async with self._room:
            self._closed = True
            self._room.notify_all()
            self._more.notify_all()

    async def take(self, number: int) -> Sequence[str]:
        """The rows of a number, the same as often as it is asked for until they are answered; none after that."""
        async with self._more:
            if number not in self._given and number not in self._kept:
                await self._more.wait_for(lambda: bool(self._read) or self._closed)
                if number in self._given or number in self._kept:  # asked for twice at a time: this one is another's
                    self._more.notify()
                else:
                    self._given[number] = self._read.popleft() if self._read else ()
                    self._room.notify()
            return self._given.get(number, ())

    async def kept(self, numbers: Sequence[int]) -> None:
        """The answers of these are kept: nobody needs their rows again."""
        self._kept.update(numbers)
        for number in numbers:
            self._given.pop(number, None)
