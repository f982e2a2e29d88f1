"""Steady decode steps: the same rows, one more token each, in the buffers of the previous step.

A steady step writes tokens and cursors, runs, and leaves sampling to the loop. The loop drops it when a row joins,
leaves, finishes or changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from partita.runtime.generate.bound_graph import BoundGraph
from partita.runtime.generate.choice.logprobs import RecordingSampler
from partita.runtime.generate.executor import Runner
from partita.runtime.generate.planner import StepPlan
from partita.runtime.generate.request import Row, endings


class LiveRow(NamedTuple):
    """A decoding row."""

    place: int
    """Index in the batch."""
    row: Row
    logits: npt.NDArray[np.float32] | None
    """[vocab] in the memory that runs write; None if on a device or not float32."""


class SteadyStep:
    """A decode step that can be repeated."""

    def __init__(self, graph: BoundGraph, runner: Runner, rows: Sequence[Row | None], plan: StepPlan) -> None:
        """`rows` [B] of the batch, and the `plan` of the step that `graph` has run and will repeat."""
        live = [(index, row) for index, row in enumerate(rows) if row is not None and plan.take[index]]
        self.graph = graph
        self.rows = tuple(LiveRow(index, row, graph.host_logits(index)) for index, row in live)
        self.endings = endings(rows)
        self.watched = any(isinstance(row.request.sampler, RecordingSampler) for _, row in live)
        """Whether a row records log-probabilities."""
        self.drafts = any(entry.row.request.drafter is not None for entry in self.rows)
        """Whether a row may have draft tokens when drafting is on."""
        self._filled = runner.cache.filled
        first = graph.span[0] if graph.span else 0
        cursors = graph.cursors
        flat = {role: array.reshape(-1) for role, array in cursors.items() if role in OFFSETS}
        self._tokens = graph.fed.reshape(-1)
        self._places = tuple((index, index - first, row.history) for index, row in live)
        self._cursors = tuple((array, OFFSETS[role]) for role, array in flat.items())
        self._total: npt.NDArray[Any] | None = cursors.get("total_length")
        self._mask: npt.NDArray[Any] | None = cursors.get("mask")
        self._resting = max((plan.starts[i] for i in range(len(rows)) if not plan.take[i]), default=0)
        if "cache_branch" in cursors:
            cursors["cache_branch"].fill(True)

    def run(self) -> float:
        """Feed every row its last token, run, and move the cursors; return the seconds of the run."""
        filled, furthest, mask = self._filled, self._resting, self._mask
        for index, seat, history in self._places:
            start = filled[index]
            self._tokens[seat] = history[start]
            for array, offset in self._cursors:
                array[seat] = start + offset
            if mask is not None:
                mask[seat, start] = 1
            if start > furthest:
                furthest = start
        if self._total is not None:
            self._total[()] = furthest + 1
        seconds = self.graph.repeat()
        for index, _, _ in self._places:
            filled[index] += 1
        return seconds


OFFSETS = {"positions": 0, "last_index": 0, "write_start": 0, "valid_length": 1}
"""Cursors [B] of a decode step, by role, minus the position of the row's token."""


def steady_step(graph: BoundGraph, runner: Runner, rows: Sequence[Row | None], plan: StepPlan) -> SteadyStep | None:
    """The steady step after `plan`, which `graph` has just run; None if the next step may differ.

    It requires a step of one token for each row, of which none has finished or has a listener, no profiling, and no
    inputs besides tokens and cursors.
    """
    if plan.reads or plan.new_tokens != 1 or not graph.repeats or runner.has_rope_length:
        return None
    filled = runner.cache.filled
    for row, take, count in zip(rows, plan.take, filled, strict=True):
        goes_on = row is not None and row.finish is None
        if goes_on != (take == 1):
            return None
        if row is not None and goes_on and (count != row.known - 1 or not row.has_no_drafts):
            return None
    return SteadyStep(graph, runner, rows, plan)
