"""Selecting among the weights of a large vocabulary without sorting all of it: the largest k, the nucleus, one draw."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
"""[n], float32 or float64."""
Places: TypeAlias = npt.NDArray[np.intp]
"""[n]."""
BLOCK = 1024
"""Of more than four times as many values, sums of blocks are looked at first: a cumulative sum of all is slow."""
SPARSE = 8
"""One weight in so many at most is taken out; of more, all are kept."""


def largest(values: Values, count: int) -> Places:
    """Places of the `count` largest of `values` [n], ascending, and of all that equal the last of them."""
    return np.flatnonzero(values >= np.partition(values, -count)[-count])


def nucleus(weights: Values, share: float, least: float) -> tuple[Places | None, Values]:
    """The weights [n] of at least `least` in the nucleus, with their places, ascending; None for all places, where
    those that are left out weigh 0. No weight is negative.

    The nucleus is the largest weights that together first reach `share` of the sum of all. Of equal ones at its edge
    the first are in it.
    """
    total = float(weights.sum())
    # All below this are together less than what the nucleus leaves out; 0.999 for rounding.
    some = weights >= max(least, 0.999 * (1 - share) * total / len(weights))
    places = np.flatnonzero(some) if SPARSE * np.count_nonzero(some) <= len(weights) else None
    weights = weights * some if places is None else weights[places]
    if share < 1:
        ordered = np.sort(weights)[::-1]
        count = _reaches(ordered, share * total, "left") + 1
        edge = ordered[count - 1]
        inside = weights >= edge
        inside[np.flatnonzero(weights == edge)[count - int(np.count_nonzero(weights > edge)) :]] = False
        np.multiply(weights, inside, out=weights)
    return places, weights


def draw(weights: Values, uniform: float) -> int:
    """A place in `weights` [n], none negative, each as likely as it weighs. `uniform`: a number from 0 to below 1."""
    return _reaches(weights, uniform * float(weights.sum()), "right")  # `right`: never one that weighs nothing


def _reaches(values: Values, wanted: float, side: Literal["left", "right"]) -> int:
    """The place where the cumulative sum of `values` reaches (left) or passes (right) `wanted`; beyond the end, by
    rounding, the last that adds to it.
    """
    begin = 0
    if len(values) > 4 * BLOCK:
        bounds = np.cumsum(np.add.reduceat(values, np.arange(0, len(values), BLOCK)), dtype=np.float64)
        block = _first(bounds, wanted, side)
        wanted -= bounds[block - 1] if block else 0.0
        begin = block * BLOCK
    return begin + _first(np.cumsum(values[begin : begin + 4 * BLOCK], dtype=np.float64), wanted, side)


def _first(bounds: npt.NDArray[np.float64], wanted: float, side: Literal["left", "right"]) -> int:
    place = int(np.searchsorted(bounds, wanted, side=side))
    return place if place < len(bounds) else int(np.searchsorted(bounds, bounds[-1]))
