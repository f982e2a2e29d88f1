"""Selecting among the weights of a large vocabulary without sorting it: the largest k, a nucleus, one draw. Pure numpy.

A full sort or a cumulative sum of 150,000 values takes milliseconds, a comparison of all of them some microseconds, so
each function here narrows with comparisons and sorts what little is left. All are exact, ties included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
"""[n], float32 or float64."""
BLOCK = 128
"""Values that are looked at as one, by their maximum or sum."""
FEW = 2048
"""So many values are sorted without further ado."""
GUESS = 256
"""Most often a nucleus has no more than so many."""
ROUNDS = 4
"""So often the values are narrowed; what is left then is sorted, however much it is."""
SAMPLE = 1024
"""Values of a sample that tells where in the whole to look."""
MARGIN = 24
"""Places of the sorted sample on either side of the estimate, about three standard deviations near a median."""


def largest(values: Values, count: int) -> npt.NDArray[np.intp]:
    """Places of the `count` largest of `values` [n], in ascending order, and of all that equal the last of them."""
    blocks = np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))
    if count > len(blocks) // 2:
        return np.flatnonzero(values >= np.partition(values, -count)[-count])
    # So many blocks have a value of at least this, so the last one that is wanted is not below it.
    near = np.flatnonzero(values >= np.partition(blocks, -count)[-count])
    found = values[near]
    chosen: npt.NDArray[np.intp] = near[found >= np.partition(found, -count)[-count]]
    return chosen


def nucleus(weights: Values, share: float) -> npt.NDArray[np.bool_]:
    """Which of the largest `weights` [n], none negative, together first reach `share` of the sum: [n], at least one.

    Of equal ones at the edge, those that come first are taken.
    """
    total = float(weights.sum())
    limit = share * total
    few = weights[largest(weights, min(GUESS, len(weights)))]
    if float(few.sum()) >= limit or len(few) == len(weights):
        return _up_to(weights, few, 0.0, limit)
    least, above = float(few.min()), float(few.sum())
    open_ = weights[weights < least]  # still to decide; `above` is the sum of what is taken
    for _ in range(ROUNDS):
        if len(open_) <= FEW:
            break
        high, low = _bracket(open_, (limit - above) / (total - above))
        taken, within = open_ >= high, open_ >= low
        of_taken, of_within = (above + float((open_ * each).sum()) for each in (taken, within))
        if of_taken >= limit:
            open_ = open_[taken]
        elif of_within < limit:
            above, open_ = of_within, open_[~within]
        else:
            above, open_ = of_taken, open_[within & ~taken]
    return _up_to(weights, open_, above, limit)


def _bracket(values: Values, share: float) -> tuple[float, float]:
    """A value above and one below that at which the larger `values` probably reach `share` of the sum."""
    sample = np.sort(values[:: max(len(values) // SAMPLE, 1)])[::-1]
    sums = np.cumsum(sample, dtype=np.float64)
    place = int(np.searchsorted(sums, share * sums[-1]))
    return float(sample[max(place - MARGIN, 0)]), float(sample[min(place + MARGIN, len(sample) - 1)])


def _up_to(weights: Values, open_: Values, above: float, limit: float) -> npt.NDArray[np.bool_]:
    """Which `weights` are taken when those larger than all of `open_` sum up to `above`, and more of these follow."""
    ordered = np.sort(open_)[::-1]
    before = np.cumsum(ordered, dtype=np.float64) - ordered + above
    wanted = max(int(np.count_nonzero(before < limit)), 1)
    least = float(ordered[wanted - 1])
    return _first_of_equals(weights, least, int(np.count_nonzero(ordered[:wanted] == least)))


def _first_of_equals(values: Values, least: float, count: int) -> npt.NDArray[np.bool_]:
    """Which `values` are above `least`, and the first `count` of those that equal it."""
    found: npt.NDArray[np.bool_] = values >= least
    equal = np.flatnonzero(values == least)
    found[equal[count:]] = False
    return found


def draw(weights: Values, uniform: float) -> int:
    """The place in `weights` [n] that a number from 0 to below 1 falls on, each as likely as it weighs.

    A place of weight 0 is never taken.
    """
    starts = np.arange(0, len(weights), BLOCK)
    bounds = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    wanted = uniform * bounds[-1]
    # `right` cannot land on what weighs nothing.
    block = min(int(np.searchsorted(bounds, wanted, side="right")), len(starts) - 1)
    inside = np.cumsum(weights[starts[block] : starts[block] + BLOCK], dtype=np.float64)
    rest = wanted - (bounds[block - 1] if block else 0.0)
    # The sums of a block are rounded in two ways; past its end is its last place that weighs something.
    place = min(int(np.searchsorted(inside, rest, side="right")), int(np.searchsorted(inside, inside[-1])))
    return int(starts[block]) + place
