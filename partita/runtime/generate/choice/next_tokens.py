"""The next tokens of rows from the logits of a step: sampled, or verified against draft tokens.

A steady decode step has the same rows, one more token each, in the buffers of the previous step. The loop drops it when
a row joins, leaves, finishes or changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError
from partita.runtime.generate.bound_graph import BoundGraph
from partita.runtime.generate.cache import Cache
from partita.runtime.generate.choice.device_choice import LargestLogits
from partita.runtime.generate.choice.sampling import Draws, RecordingSampler, Sampler, greedy
from partita.runtime.generate.executor import Runner
from partita.runtime.generate.planner import StepPlan
from partita.runtime.generate.request import Row, endings

Logits = npt.NDArray[np.float32]
"""[vocab]."""


def _selected_logits(row: Row, graph: BoundGraph, index: int, position: int) -> LargestLogits | Logits:
    """The logits of a position of a row: the largest if the device selected what its sampler needs, else all."""
    sampler = row.request.sampler
    count = 1 if sampler is greedy else sampler.candidate_count if isinstance(sampler, Draws) else 0
    few = graph.logits.largest(index, position, count) if count else None
    return graph.logits(index, position) if few is None else few


def _is_finite(logits: LargestLogits | Logits) -> bool:
    """Whether no logit is NaN or infinite; the device selects among finite logits only."""
    return isinstance(logits, tuple) or isfinite(logits.max())  # the maximum is NaN if any value is


@dataclass(slots=True)
class NextTokens:
    """Adds tokens to the rows of a batch."""

    cache: Cache
    step_count: int = 0
    """Number of steps so far."""

    def after_run(self, rows: list[Row | None], plan: StepPlan, graph: BoundGraph) -> tuple[tuple[int, ...], ...]:
        """Pass logits to listeners, and add tokens to each row whose last token was fed. [B]: the new tokens."""
        tokens: list[tuple[int, ...]] = [()] * len(rows)
        for index, row in enumerate(rows):
            if row is not None and row.request.listener is not None:
                begin = self.cache.lengths[index] - plan.counts[index]
                for position in plan.positions:
                    if position < plan.counts[index] and begin + position >= row.request.listens_from:
                        row.request.listener(begin + position, graph.logits(index, position))
        for index, position in plan.ends:
            row = rows[index]
            assert row is not None
            row.is_repeated = False
            if row.drafted:
                tokens[index] = self._verify(index, row, graph)
            elif row.request.sampler is not None:
                tokens[index] = self.add(index, row, graph, position)
            elif row.request.listener is None and not _is_finite(graph.logits(index, position)):
                self._fail(index, row)  # no sampler would detect it, and a cached prefix would contain it
        return tuple(tokens)

    def _verify(self, index: int, row: Row, graph: BoundGraph) -> tuple[int, ...]:
        """Choose the token after the last token and after each accepted draft token; remove rejected draft tokens.

        The sampler draws from the model's logits, so the distribution does not change.
        """
        drafts, row.drafted = row.drafts, 0
        is_finite = _is_finite(_selected_logits(row, graph, index, len(drafts)))
        # Attention may spread values of draft tokens that are not finite, also where they are masked (0 * NaN).
        if not is_finite and self.cache.wipe(index):
            self.cache.release_row(index)
            row.request = replace(row.request, drafter=None)
            row.read_again()
            return ()
        found: tuple[int, ...] = ()
        for position, token in enumerate((*drafts, None)):
            new = self.add(index, row, graph, position)
            found += new
            if row.finish is not None or new != (token,):
                break
        if row.error is None:
            self.cache.rewind(index, len(drafts) + 1 - max(len(found), 1))
        return found

    def add(self, index: int, row: Row, graph: BoundGraph, position: int) -> tuple[int, ...]:
        """Add the next token of a row from the logits of a position; none if its cache is full."""
        sampler, logits = row.request.sampler, _selected_logits(row, graph, index, position)
        assert sampler is not None
        if not _is_finite(logits) and self._fail(index, row):
            return ()
        if row.known == len(row.history):
            row.finish = "cache_full"
            return ()
        if not isinstance(logits, tuple):
            token = sampler(logits, row.history[: row.known])
        else:
            token = sampler.choose_from(*logits) if isinstance(sampler, Draws) else int(logits[0][0])
        row.add(token)
        return (token,)

    def _fail(self, index: int, row: Row) -> bool:
        """Handle logits that are not finite: end the row (True), raise GenerationError, or ignore them (False)."""
        message = (
            f"the logits of step {self.step_count}, row {index}, are not finite; export the checkpoint in a higher "
            "`precision`, or check its weights"
        )
        if row.request.fails_alone and self.cache.wipe(index):
            row.finish, row.error = "error", message
            return True
        self.cache.dirty = True
        if not row.request.any_logits:
            raise GenerationError(message)
        return False


class LiveRow(NamedTuple):
    """A decoding row."""

    batch_index: int
    span_index: int
    """Index among the rows of the run."""
    row: Row
    history: npt.NDArray[np.int64]
    sampler: Sampler
    """Only rows with one have a steady step."""
    logits: Logits | None
    """In the memory that runs write; None on a device, or if not float32."""


class SteadyStep:
    """A decode step that can be repeated."""

    def __init__(self, graph: BoundGraph, runner: Runner, rows: Sequence[Row | None], plan: StepPlan) -> None:
        """`rows` [B] of the batch, and the `plan` of the step that `graph` has run and will repeat."""
        live = [(index, row) for index, row in enumerate(rows) if row is not None and plan.counts[index]]
        first = graph.span[0] if graph.span else 0
        self.graph = graph
        self.rows = tuple(
            LiveRow(index, index - first, row, row.history, row.request.sampler or greedy, graph.logits.in_place(index))
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

    def run(self, next_tokens: NextTokens) -> tuple[float, float, tuple[tuple[int, ...], ...], bool]:
        """Feed every row its last token, run, and add each row's next token.

        Returns when the run began and ended, the new tokens of each row [B], and whether a row has finished.
        """
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
        tokens, finished = self._no_tokens.copy(), False
        for index in self._indices:
            filled[index] += 1
        for index, _, row, history, sampler, logits in self.rows:
            if logits is not None and isfinite(logits[largest := int(logits.argmax())]):  # NaN if any value is NaN
                token = largest if sampler is greedy else sampler(logits, history[: row.known])
                row.add(token)
                tokens[index] = (token,)
            else:
                tokens[index] = next_tokens.add(index, row, self.graph, 0)
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
    for row, take, count in zip(rows, plan.counts, runner.cache.lengths, strict=True):
        goes_on = row is not None and row.finish is None
        if goes_on != (take == 1):
            return None
        if row is not None and goes_on and (count != row.known - 1 or not row.has_no_drafts):
            return None
    return SteadyStep(graph, runner, rows, plan)
