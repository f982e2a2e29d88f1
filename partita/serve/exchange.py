"""One HTTP request at work: its prompts in the scheduler, and all that can happen to it in one queue.

Pieces come from the thread that steps; that the client has gone, that time is up and that the server ends come from the
event loop. Whoever reads the queue meets them in the order in which they came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from partita.errors import PartitaError
from partita.library.scheduler import Piece, Ticket, Work
from partita.serve.answers import Choice
from partita.serve.api_errors import failed, invalid, of_error, overloaded, shutting_down, too_slow
from partita.serve.limits import ServerLimits
from partita.serve.served import Served

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class GoneError(Exception):
    """The client has gone; nobody reads an answer."""


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of a choice."""

    index: int
    piece: Piece
    error: PartitaError | None
    """What ended it."""


class Exchange:
    """The prompts of one request. `close` it, whatever comes of it: that frees their rows."""

    def __init__(self, served: Served, limits: ServerLimits, began: float) -> None:
        """`began`: when the request came, by `time.monotonic`."""
        self.served, self._limits = served, limits
        self.deadline = began + limits.seconds
        """By the clock of `time.monotonic`."""
        self.choices: list[Choice] = []
        self.tickets: list[Ticket] = []
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Said | Exception] = asyncio.Queue()
        self._answers = 0
        """That were asked for."""
        self._left = 0
        self._wrong: Exception | None = None
        """What ends the request once the pieces before it are out."""
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None

    def check(self, prompts: int, each: int) -> None:
        """Note how many answers are asked for, `each` to every prompt.

        Raises ApiError for more than there is room for at any time.
        """
        self._answers = answers = prompts * each
        if answers > self._room():
            raise invalid(
                f"The request asks for {answers:,} answers, and this server takes {self._room():,} at once.",
                "prompt" if each == 1 else "n",
            )

    def _room(self) -> int:
        return self.served.slots + self._limits.queue

    async def begin(self, read: Callable[[], list[Work]], receive: Receive) -> None:
        """Have the prompts read in the thread for that, and have each wait for its turn. Time runs meanwhile, and the
        client is watched.

        Raises what `read` does, ApiError where there is no room for them all and when time is up, GoneError.
        """
        if self.served.open + self.served.unread + self._answers > self._room():
            raise overloaded(
                f"The queue of {self.served.name} is full ({self._limits.queue:,} waiting); try again later.",
                "queue_full",
            )
        self._timer = self._loop.call_later(max(0.0, self.deadline - time.monotonic()), self._late)
        self._watch = self._loop.create_task(self._until_gone(receive))
        self.served.unread += self._answers
        try:
            works = await self._read(read)
        finally:
            self.served.unread -= self._answers
        for index, work in enumerate(works):
            try:
                self.tickets.append(self.served.submit(work, self._hearing(index)))
            except PartitaError as error:
                raise of_error(error) from error
            self.choices.append(Choice(len(work.prompt)))
        self._left = len(works)

    async def _read(self, read: Callable[[], list[Work]]) -> list[Work]:
        """The prompts, unless something ends the request before: what nobody waits for is not read any more."""
        reading: asyncio.Future[list[Work]] = self._loop.run_in_executor(self.served.encoder, self.served.read, read)
        ending: asyncio.Future[Any] = self._loop.create_task(self._events.get())
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                self._checked(ending.result())
            return await reading
        finally:
            ending.cancel()
            reading.cancel()

    def _hearing(self, index: int) -> Callable[[Ticket, Piece], None]:
        def hear(ticket: Ticket, piece: Piece) -> None:
            said = Said(index, piece, ticket.error)
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._events.put_nowait, said)

        return hear

    def _late(self) -> None:
        self._events.put_nowait(too_slow(self._limits.seconds))

    def end(self) -> None:
        """Tell whoever waits that the server ends."""
        self._events.put_nowait(shutting_down())

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(GoneError())

    @property
    def over(self) -> bool:
        """Every choice has been heard to its end."""
        return self._left == 0

    async def next(self) -> list[Said]:
        """The next pieces, as many as there are. Raises ApiError when the request ends without an answer, GoneError."""
        found = [self._checked(self._wrong or await self._events.get())]
        while not self.over and not self._events.empty():
            event = self._events.get_nowait()
            try:
                found.append(self._checked(event))
            except Exception as error:  # noqa: BLE001 - it is raised when what came before it was sent
                self._wrong = error
                break
        return found

    def _checked(self, event: Said | Exception) -> Said:
        if isinstance(event, Exception):
            raise event
        finish = event.piece.finish_reason
        if finish in ("error", "interrupted"):
            raise failed(event.error)
        self._left -= finish is not None
        return event

    def close(self) -> None:
        """Give up what is not over. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        for ticket in self.tickets:
            if ticket.state != "over":
                ticket.cancel()
