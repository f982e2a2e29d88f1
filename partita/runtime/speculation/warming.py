"""Runs of several tokens before the first generation with guesses: what they cost here, and their buffers made.

The first step of a width takes as long as two or three (the buffers, and what ONNX Runtime lays out for new shapes),
and what the first guesses may cost at all is half of one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from partita.errors import PartitaError
from partita.runtime.engine.executor import Executor
from partita.runtime.engine.planner import RowView, plan_step
from partita.runtime.speculation.costs import Warmed

SECONDS = 0.25
"""No further run is begun after so long: a model for which that is a few steps has widths that cost next to nothing."""
ROUNDS = 4
"""Runs of each width, beside the first."""
CHUNK_TOKENS = 512


def warmed(executor: Executor, widths: Sequence[int]) -> Warmed | None:
    """Times of runs of these widths, as far as there is time; The cache is empty afterwards. None where
    runs are profiled now, which are to be those of a generation, and where one fails: that shows where it matters.
    """
    if executor.observed:
        return None
    began = time.perf_counter()
    runs = _Runs(executor)
    plain: list[float] = []
    wide: dict[int, list[float]] = {}
    after: dict[int, list[float]] = {}
    try:
        executor.cache.prepare()
        runs.begin()
        for _ in range(ROUNDS + 1):
            if len(plain) < 2 or time.perf_counter() - began <= SECONDS:
                plain.append(runs.run(1))
        for width in widths:
            if runs.known + width > executor.contract.max_length:
                break
            for number in range(ROUNDS + 1):
                if time.perf_counter() - began > SECONDS:
                    break
                times = runs.run(width), runs.run(1)
                if number:  # the first made the buffers
                    wide.setdefault(width, []).append(times[0])
                    after.setdefault(width, []).append(times[1])
    except PartitaError:
        return None
    finally:
        executor.cache.prepare()
    shortest = {width: min(seen) for width, seen in wide.items()}
    # Nothing takes longer than what is wider; where it seems so, the process had to wait each time.
    bounded = {width: min(shortest[other] for other in shortest if other >= width) for width in shortest}
    return Warmed(min(plain[1:]), bounded, {width: min(seen) for width, seen in after.items()})


class _Runs:
    """Rows that are fed one token, and then some more which they forget again."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        batch = executor.contract.batch_size
        self._live = batch if executor.graphs.appends(batch) else 1
        self.known = 1

    def begin(self) -> None:
        """Read the first token."""
        self._feed(1, reads=True)

    def run(self, width: int) -> float:
        """Seconds of a run of so many tokens."""
        began = time.perf_counter()
        self._feed(width, reads=False)
        seconds = time.perf_counter() - began
        for row in range(self._live):
            self._executor.cache.rewind(row, self._executor.cache.filled[row] - self.known)
        return seconds

    def _feed(self, width: int, *, reads: bool) -> None:
        executor = self._executor
        filled = executor.cache.filled
        rows = [RowView(filled[row], width, reads, every_logit=width > 1) for row in range(self._live)]
        rows += [RowView(0, 0, live=False)] * (executor.contract.batch_size - self._live)
        plan = plan_step(rows, executor.graphs, CHUNK_TOKENS)
        assert plan is not None
        graph = executor.prepare(plan)
        graph.tokens.fill(0)
        executor.run(plan, graph, executor.contract.max_length)
        for row, position in plan.ends:
            graph.logits(row, position).argmax()
