"""What a row's sampler needs of the logits of a position, and whether they are finite."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.runtime.engine.bound_graph import BoundGraph
from partita.runtime.engine.device_choice import Found
from partita.runtime.engine.request import Row
from partita.runtime.sampling import Draws, greedy


class Seen(NamedTuple):
    """The logits of a position, as few as the sampler needs."""

    few: Found | None
    """The largest of them, where the device selected them."""
    whole: npt.NDArray[np.float32] | None
    """All of them, [vocab], where it did not."""
    finite: bool


def look(row: Row, graph: BoundGraph, index: int, position: int) -> Seen:
    """The logits of a position of a row, for its sampler."""
    sampler = row.request.sampler
    count = 1 if sampler is greedy else sampler.few if isinstance(sampler, Draws) else 0
    few = graph.largest(index, position, count) if count else None
    if few is not None:
        return Seen(few, None, finite=True)
    whole = graph.logits(index, position)
    return Seen(None, whole, bool(np.isfinite(whole.max())))  # the maximum is NaN if any of them is
