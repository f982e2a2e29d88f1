"""What a row's sampler has to know of the logits of a position, and whether they are finite."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.runtime.engine.bound_graph import BoundGraph
from partita.runtime.engine.choosing import Found
from partita.runtime.engine.request import Row
from partita.runtime.sampling import Draws, greedy


class Seen(NamedTuple):
    """What is known of the logits of a position, by the least that has to be copied for it."""

    token: int | None
    """The likeliest, where that alone is wanted and was found where they are."""
    few: Found | None
    """The largest, where these were."""
    whole: npt.NDArray[np.float32] | None
    """All of them, [vocab], where neither was."""
    finite: bool


def look(row: Row, graph: BoundGraph, index: int, position: int) -> Seen:
    """The logits of a position of a row, for its sampler."""
    sampler = row.request.sampler
    token = graph.likeliest(index, position) if sampler is greedy else None
    few = graph.largest(index, position, sampler.few) if isinstance(sampler, Draws) and sampler.few else None
    if token is not None or few is not None:
        return Seen(token, few, None, finite=True)
    whole = graph.logits(index, position)
    return Seen(None, None, whole, bool(np.isfinite(whole.max())))  # which is NaN if any is
