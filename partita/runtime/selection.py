"""Selecting among the weights of a large vocabulary without sorting it: the largest k, and one draw. Pure numpy.

A full sort or a cumulative sum of 150,000 values takes milliseconds, a comparison of all of them some microseconds, so
each function here compares and adds, and sorts what little is left. What a processor would have to guess at each value,
as picking by a mask, is avoided too. All are exact, ties included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
"""[n], float32 or float64."""
Places: TypeAlias = npt.NDArray[np.intp]
"""[n]."""
BLOCK = 128
"""Values that are looked at as one, by their maximum or sum."""
FEW = 64
"""Of so many values one at most is taken out; with more, all are gone through once more."""


def largest(values: Values, count: int) -> Places:
    """Places of the `count` largest of `values` [n], in ascending order, and of all that equal the last of them."""
    peaks = _peaks(values)
    if count > len(peaks) // 2:
        return np.flatnonzero(values >= np.partition(values, -count)[-count])
    return _largest(values, peaks, count)


def _largest(values: Values, peaks: Values, count: int) -> Places:
    """The same, where the blocks outnumber what is wanted."""
    # So many blocks have a value of at least this, so the last one that is wanted is not below it.
    near = np.flatnonzero(values >= np.partition(peaks, -count)[-count])
    found = values[near]
    chosen: Places = near[found >= np.partition(found, -count)[-count]]
    return chosen


def _rows(values: Values) -> tuple[Values, Values]:
    """The values as `BLOCK` rows, of which a column is a block, and those that are left over.

    Rows are added and compared as a whole: five times as fast as blocks of neighbours.
    """
    whole = len(values) // BLOCK * BLOCK
    return values[:whole].reshape(BLOCK, -1), values[whole:]


def _peaks(values: Values) -> Values:
    """The largest of each block of `values`."""
    rows, rest = _rows(values)
    return np.concatenate((rows.max(axis=0), rest)) if rows.size else rest


def draw(weights: Values, random: Callable[[], float], share: float = 1.0, least: float = 0.0) -> int:
    """A place in `weights` [n], none negative, each as likely as it weighs; `weights` are written to.

    Drawn from are those of at least `least`, which is no more than the largest, in the nucleus: the largest that
    together first reach `share` of the sum of all. Of equal ones at its edge those that come first are in it, and at
    least one is. What weighs nothing is never drawn. `random` gives numbers from 0 to below 1.

    The nucleus is never made. One is drawn from more than it, and is inside if what comes before it has not reached the
    share; if not, what comes before it is more than the nucleus, and the next is drawn from that. Each that is inside
    is as likely as if it had been drawn from the nucleus, and 1 + log(1 / share) are looked at, or so.
    """
    if share >= 1 and least <= 0:
        return _drawn(weights, _bounds(weights), random())
    total = _sum(weights)
    limit = share * total if share < 1 else math.inf
    # All below this are together less than what the nucleus leaves out; 0.999 for rounding.
    outside = 0.999 * (1 - share) * total / len(weights)
    some = weights >= max(least, outside)
    if FEW * np.count_nonzero(some) <= len(weights):
        places = np.flatnonzero(some)
        return int(places[_in_nucleus(weights[places], random, limit)])
    if least > outside:
        np.multiply(weights, some, out=weights)
    return _in_nucleus(weights, random, limit)


def _in_nucleus(weights: Values, random: Callable[[], float], limit: float) -> int:
    """The same, from the largest that together first reach `limit`, or from all where they do not."""
    while (bounds := _bounds(weights))[-1] >= limit:
        place = _drawn(weights, bounds, random())
        value = weights[place]
        np.multiply(weights, weights >= value, out=weights)
        if _sum(weights) < limit:
            return place
        equal = np.flatnonzero(weights == value)
        weights[equal[np.searchsorted(equal, place) :]] = 0
        if _sum(weights) < limit:
            return place
    return _drawn(weights, bounds, random())


def _sum(weights: Values) -> float:
    """The sum of `weights`."""
    rows, rest = _rows(weights)
    return float(rows.sum(axis=0).sum(dtype=np.float64) + rest.sum(dtype=np.float64))


def _bounds(weights: Values) -> npt.NDArray[np.float64]:
    """Sums of the blocks of `weights`, each with all before it; what is left over is the last block."""
    rows, rest = _rows(weights)
    bounds = np.empty(rows.shape[1] + 1)
    np.cumsum(rows.sum(axis=0), dtype=np.float64, out=bounds[:-1])
    bounds[-1] = (bounds[-2] if rows.size else 0.0) + rest.sum(dtype=np.float64)
    return bounds


def _drawn(weights: Values, bounds: npt.NDArray[np.float64], uniform: float) -> int:
    """The place in `weights` on which a number from 0 to below 1 falls; blocks one after the other."""
    wanted = uniform * bounds[-1]
    # `right` cannot land on what weighs nothing; past the end, by rounding, is the last that weighs something.
    block = min(int(np.searchsorted(bounds, wanted, side="right")), int(np.searchsorted(bounds, bounds[-1])))
    rows, rest = _rows(weights)
    columns = int(rows.shape[1])
    inside = np.cumsum(rows[:, block] if block < columns else rest, dtype=np.float64)
    wanted -= bounds[block - 1] if block else 0.0
    place = min(int(np.searchsorted(inside, wanted, side="right")), int(np.searchsorted(inside, inside[-1])))
    return place * columns + block if block < columns else columns * BLOCK + place
