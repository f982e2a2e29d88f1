"""The desk at which rows lie: as far ahead as it may be, every block for one number, again and again. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from partita.errors import GenerationError
from partita.library.batches.rows import InputRow
from partita.library.cluster.desk import Desk
from partita.library.cluster.running import Reader
from partita.library.cluster.worker import ROWS

SECONDS = 30.0
"""Longest wait for what takes no time."""


def in_time(act: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(act(), SECONDS))


async def waits(task: asyncio.Task[Any]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


def test_a_block_is_one_numbers_and_the_same_again_until_its_answers_are_kept():
    async def act() -> None:
        desk = Desk(ahead=8)
        for name in "abc":
            await desk.put([name])
        assert [await desk.take(7), await desk.take(3), await desk.take(7)] == [["a"], ["b"], ["a"]]
        await desk.kept([7])
        assert not await desk.take(7), "what is answered is not read into another number"
        assert await desk.take(5) == ["c"]

    in_time(act)


def test_who_reads_waits_for_those_who_answer_and_the_other_way_round():
    async def act() -> None:
        desk = Desk(ahead=2)
        await desk.put(["a"])
        second = asyncio.create_task(desk.put(["b"]))
        assert await waits(second)
        assert await desk.take(0) == ["a"]
        await second
        assert await desk.take(1) == ["b"]
        third = asyncio.create_task(desk.take(2))
        assert await waits(third)
        await desk.put(["c"])
        assert await third == ["c"]

    in_time(act)


def test_a_number_that_two_workers_ask_for_gets_one_block_and_the_next_is_anothers():
    async def act() -> None:
        desk = Desk(ahead=8)
        twice = [asyncio.create_task(desk.take(0)) for _ in range(2)]
        other = asyncio.create_task(desk.take(1))
        assert await waits(other)
        await desk.put(["a"])
        await desk.put(["b"])
        assert [await task for task in twice] == [["a"], ["a"]] and await other == ["b"]

    in_time(act)


def test_who_waited_for_a_number_that_is_answered_by_now_takes_no_block_of_another():
    async def act() -> None:
        desk = Desk(ahead=8)
        first, late = (asyncio.create_task(desk.take(0)) for _ in range(2))
        assert await waits(first) and await waits(late)
        await desk.put(["a"])
        assert await first == ["a"] and await waits(late)
        await desk.kept([0])
        await desk.put(["b"])
        assert not await late and await desk.take(1) == ["b"]

    in_time(act)


def test_behind_the_last_block_there_are_none_and_nobody_waits():
    async def act() -> None:
        desk, idle = Desk(ahead=1), Desk(ahead=1)
        laid, asked = asyncio.create_task(desk.put(["a"])), asyncio.create_task(idle.take(0))
        assert await waits(laid) and await waits(asked)
        await desk.close()
        await idle.close()
        await laid
        assert await desk.take(0) == ["a"] and not await desk.take(1) and not await asked

    in_time(act)


class Called:
    """In place of the desk's actor and of Ray: what is called, is called."""

    def __init__(self, most: int | None = None) -> None:
        self.blocks: list[list[str]] = []
        self.closed, self._most = 0, most
        self.put = self.close = self

    def remote(self, *rows: list[str]) -> Any:
        return rows

    def get(self, rows: tuple[list[str], ...]) -> None:
        if not rows:
            self.closed += 1
        elif self._most is not None and len(self.blocks) >= self._most:
            raise RuntimeError("the desk is gone")
        else:
            self.blocks.append(rows[0])


def read(rows: Iterator[InputRow], size: int, blocks: int, most: int | None = None) -> tuple[Reader, Called]:
    desk = Called(most)
    reader = Reader(desk, desk, rows, size, blocks)
    reader.start()
    reader.join(SECONDS)
    return reader, desk


def rows_of(count: int) -> Iterator[InputRow]:
    return (InputRow(number, {"tokens": [1], "colour": "red"}) for number in range(count))


def test_rows_are_laid_down_in_blocks_and_what_means_nothing_is_noted():
    reader, desk = read(rows_of(7), 3, 3)
    assert [[ROWS.validate_json(text).index for text in block] for block in desk.blocks] == [[0, 1, 2], [3, 4, 5], [6]]
    assert reader.error is None and reader.unread == {"colour"} and desk.closed == 1


def test_what_keeps_rows_from_being_read_comes_after_those_that_were():
    def damaged() -> Iterator[InputRow]:
        yield from rows_of(5)
        raise GenerationError("damaged behind row 5")

    reader, desk = read(damaged(), 2, 9)
    assert [len(block) for block in desk.blocks] == [2, 2, 1] and desk.closed == 1
    with pytest.raises(GenerationError, match="damaged behind row 5"):
        raise reader.error or AssertionError


@pytest.mark.parametrize(("blocks", "most", "said"), [(2, None, "more rows than when"), (9, 1, "the desk is gone")])
def test_a_file_that_has_grown_and_a_desk_that_is_gone_end_the_reading(blocks, most, said):
    reader, _ = read(rows_of(7), 3, blocks, most)
    assert said in str(reader.error)
