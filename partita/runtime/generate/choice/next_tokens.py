"""The next tokens of rows from the logits of a step: sampled, or verified against draft tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError
from partita.runtime.generate.bound_graph import BoundGraph
from partita.runtime.generate.cache.cache import Cache
from partita.runtime.generate.choice.device_choice import LargestLogits
from partita.runtime.generate.choice.sampling import Draws, greedy
from partita.runtime.generate.planner import StepPlan
from partita.runtime.generate.request import Row


class PositionLogits(NamedTuple):
    """The logits of one position, as far as a sampler needs them."""

    largest: LargestLogits | None
    """The largest logits, if the device selected them."""
    full: npt.NDArray[np.float32] | None
    """[vocab], otherwise."""
    finite: bool


def position_logits(row: Row, graph: BoundGraph, index: int, position: int) -> PositionLogits:
    """The logits of a position of a row, for its sampler."""
    sampler = row.request.sampler
    count = 1 if sampler is greedy else sampler.candidate_count if isinstance(sampler, Draws) else 0
    few = graph.largest(index, position, count) if count else None
    if few is not None:
        return PositionLogits(few, None, finite=True)
    whole = graph.logits(index, position)
    return PositionLogits(None, whole, isfinite(whole.max()))  # the maximum is NaN if any value is


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
                tokens[index] = self._add(index, row, position_logits(row, graph, index, position))
            elif row.request.listener is None and not np.isfinite(graph.logits(index, position).max()):
                self._fail(index, row)  # no sampler would detect it, and a cached prefix would contain it
        return tuple(tokens)

    def after_decode(self, index: int, row: Row, graph: BoundGraph) -> tuple[int, ...]:
        """Add the next token to a row after a decode step of one token; see `after_run`."""
        return self._add(index, row, position_logits(row, graph, index, 0))

    def _verify(self, index: int, row: Row, graph: BoundGraph) -> tuple[int, ...]:
        """Choose the token after the last token and after each accepted draft token; remove rejected draft tokens.

        The sampler draws from the model's logits, so the distribution does not change.
        """
        drafts, row.drafted = row.drafts, 0
        if not position_logits(row, graph, index, len(drafts)).finite and self._without_drafts(index, row):
            return ()
        found: tuple[int, ...] = ()
        for position, token in enumerate((*drafts, None)):
            new = self._add(index, row, position_logits(row, graph, index, position))
            found += new
            if row.finish is not None or new != (token,):
                break
        if row.error is None:
            self.cache.rewind(index, len(drafts) + 1 - max(len(found), 1))
        return found

    def _without_drafts(self, index: int, row: Row) -> bool:
        """Read a row again, and draft no more: attention may spread values of draft tokens that are not finite, also
        where they are masked (0 * NaN). False if the row cannot be zeroed."""
        if not self.cache.wipe(index):
            self.cache.dirty = True
            return False
        self.cache.release_row(index)
        row.request = replace(row.request, drafter=None)
        row.read_again()
        return True

    def _add(self, index: int, row: Row, seen: PositionLogits) -> tuple[int, ...]:
        """Add the next token of a row; none if its cache is full."""
        sampler = row.request.sampler
        assert sampler is not None
        if not seen.finite and self._fail(index, row):
            return ()
        if row.known == len(row.history):
            row.finish = "cache_full"
            return ()
        if seen.largest is not None:
            token = sampler.choose_from(*seen.largest) if isinstance(sampler, Draws) else int(seen.largest[0][0])
        else:
            assert seen.full is not None
            token = sampler(seen.full, row.history[: row.known])
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
