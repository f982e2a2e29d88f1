"""Steady decode steps: the same rows, one more token each, in the buffers of the previous step.

The loop drops a steady step when a row joins, leaves, finishes or changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from partita.runtime.generate.bound_graph import BoundGraph
from partita.runtime.generate.choice.next_tokens import NextTokens
from partita.runtime.generate.choice.sampling import RecordingSampler, Sampler, greedy
from partita.runtime.generate.executor import Runner
from partita.runtime.generate.planner import StepPlan
from partita.runtime.generate.request import Row, endings


class LiveRow(NamedTuple):
    """A decoding row."""

    batch_index: int
    span_index: int
    """Index among the rows of the run."""
    row: Row
    history: npt.NDArray[np.int64]
    sampler: Sampler
    """Only rows with one have a steady step."""
    logits: npt.NDArray[np.float32] | None
    """[vocab] in the memory that runs write; None on a device, or if not float32."""


SteadyRun = tuple[float, float, tuple[tuple[int, ...], ...], bool]
"""When the run began and ended, the new tokens of each row [B], and whether a row has finished."""


class SteadyStep:
    """A decode step that can be repeated."""

    def __init__(self, graph: BoundGraph, runner: Runner, rows: Sequence[Row | None], plan: StepPlan) -> None:
        """`rows` [B] of the batch, and the `plan` of the step that `graph` has run and will repeat."""
        live = [(index, row) for index, row in enumerate(rows) if row is not None and plan.counts[index]]
        first = graph.span[0] if graph.span else 0
        self.graph = graph
        self.rows = tuple(
            LiveRow(index, index - first, row, row.history, row.request.sampler or greedy, graph.host_logits(index))
            for index, row in live
        )
        self.endings = endings(rows)
        self.watched = any(isinstance(row.request.sampler, RecordingSampler) for _, row in live)
        """Whether a row records log-probabilities."""
        self.drafts = any(row.request.drafter is not None for _, row in live)
        """Whether a row may have draft tokens when drafting is on."""
        self._cache, self._binding = runner.cache, graph.plain_binding
        self._indices = tuple(index for index, _ in live)
        self._no_tokens: list[tuple[int, ...]] = [()] * len(rows)
        cursors = graph.cursors
        self._tokens = graph.fed.reshape(-1)
        self._cursors = tuple((array.reshape(-1), OFFSETS[role]) for role, array in cursors.items() if role in OFFSETS)
        self._total: npt.NDArray[Any] | None = cursors.get("total_length")
        self._mask: npt.NDArray[Any] | None = cursors.get("mask")
        self._resting = max((plan.starts[i] for i in range(len(rows)) if not plan.counts[i]), default=0)
        if "cache_branch" in cursors:
            cursors["cache_branch"].fill(True)

    def run(self, next_tokens: NextTokens) -> SteadyRun:
        """Feed every row its last token, run, and add each row's next token."""
        filled, furthest, mask = self._cache.lengths, self._resting, self._mask
        for index, place, _, history, _, _ in self.rows:
            start = filled[index]
            self._tokens[place] = history[start]
            for array, offset in self._cursors:
                array[place] = start + offset
            if mask is not None:
                mask[place, start] = 1
            if start > furthest:
                furthest = start
        if self._total is not None:
            self._total[()] = furthest + 1
        began = perf_counter()
        try:
            if self._binding is not None:
                self._binding.run()
            else:
                self.graph.repeat()
        except BaseException:  # Ctrl-C included
            self._cache.dirty = True
            raise
        ended = perf_counter()
        for index in self._indices:
            filled[index] += 1
        tokens, finished = self._no_tokens.copy(), False
        for index, _, row, history, sampler, logits in self.rows:
            if logits is not None and isfinite(logits[largest := int(logits.argmax())]):  # NaN if any value is NaN
                token = largest if sampler is greedy else sampler(logits, history[: row.known])
                row.add(token)
                tokens[index] = (token,)
            else:
                tokens[index] = next_tokens.after_decode(index, row, self.graph)
            finished = finished or row.finish is not None
        return began, ended, tuple(tokens), finished


OFFSETS = {"positions": 0, "last_index": 0, "write_start": 0, "valid_length": 1}
"""Cursors [B] of a decode step, by role, minus the position of the row's token."""


def steady_step(graph: BoundGraph, runner: Runner, rows: Sequence[Row | None], plan: StepPlan) -> SteadyStep | None:
    """The steady step after `plan`, which `graph` has just run; None if the next step may differ.

    It requires a step of one token for each row, of which none has finished or has a listener, no profiling, and no
    inputs besides tokens and cursors.
    """
    if plan.is_prefill or plan.new_tokens != 1 or not graph.repeats or runner.has_rope_length:
        return None
    filled = runner.cache.lengths
    for row, take, count in zip(rows, plan.counts, filled, strict=True):
        goes_on = row is not None and row.finish is None
        if goes_on != (take == 1):
            return None
        if row is not None and goes_on and (count != row.known - 1 or not row.has_no_drafts):
            return None
    return SteadyStep(graph, runner, rows, plan)
