"""The memory of a run does not grow with the rows of its file, also where all answers wait for the first row."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from partita.library.batches.batch_run import AHEAD, run_file, run_rows
from partita.library.batches.prompt_files import scan_file
from partita.library.batches.rows import RowDefaults
from partita.library.engine.requests import RequestOutput
from partita.library.sampling import Sampling

FEW, MANY = 2_100, 3_400
"""Python itself keeps up to 2,000 small tuples of each length for the next ones."""
TOKENS = tuple(range(24))
BYTES_PER_ROW = 24
"""In memory: eight for the place of the answer on disk, and sixteen for a moment for the hashes of ids."""


class AtOnce:
    """In place of a scheduler: answers when it is asked to step, but the first row only behind all others."""

    slots = 8

    def __init__(self) -> None:
        self.begun, self.lost_by = SimpleNamespace(vocab_size=1000), None
        self.most_waiting = 0
        self._first: Any = None
        self._queue: list[Any] = []

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def submit(self, work: Any, listener: Callable[[Any, RequestOutput], None]) -> Any:
        said = SimpleNamespace(
            text="", tokens=TOKENS, prompt_tokens=len(work.prompt), finish_reason="stop", sampling=work.sampling
        )
        ticket = Ticket(work, listener, said)
        if self._first is None:
            self._first = ticket
        else:
            self._queue.append(ticket)
        self.most_waiting = max(self.most_waiting, len(self._queue))
        return ticket

    def step(self) -> bool:
        if not self._queue and self._first is not None and self._first.error is None:
            self._queue, self._first = [self._first], SimpleNamespace(error="said")
        now, self._queue = self._queue[: self.slots], self._queue[self.slots :]
        for ticket in reversed(now):
            ticket.listener(ticket, RequestOutput("", TOKENS, (), "stop"))
        return bool(now)

    def close(self) -> None:
        assert not self._queue


class Ticket:
    """A request of `AtOnce`."""

    def __init__(self, work: Any, listener: Any, answer: Any) -> None:
        self.work, self.listener, self.result, self.error = work, listener, answer, None


def source_of(folder: Path, count: int) -> Path:
    path = folder / f"{count}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": f"row-{n}", "tokens": [n % 60 + 1] * 24}) + "\n" for n in range(count))
    return path


def filed(source: Path, count: int) -> None:
    """The way of a prompt file to an answer file."""
    out, scheduler = source.with_suffix(".out.jsonl"), AtOnce()
    taken: Any = scheduler
    done = run_file(
        scan_file(source),
        out,
        lambda rows, defaults: run_rows(rows, defaults, taken, None, 1000),
        RowDefaults(Sampling(temperature=0.0, max_new_tokens=8)),
        package="",
        options={},
    )
    assert done.rows == count and scheduler.most_waiting <= AHEAD
    with out.open("rb") as file:
        assert all(json.loads(line)["index"] == number for number, line in enumerate(file))


def test_memory_is_flat_although_all_answers_wait_for_the_first(tmp_path: Path) -> None:
    filed(source_of(tmp_path, 10), 10)  # what is imported and kept once
    peaks = []
    for count in (FEW, MANY):
        source = source_of(tmp_path, count)
        tracemalloc.start()
        try:
            filed(source, count)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / (MANY - FEW) < BYTES_PER_ROW, peaks
