"""Selecting among the weights of a large vocabulary without sorting it: the largest k, a nucleus, one draw. Pure numpy.

A full sort or a cumulative sum of 150,000 values takes milliseconds, a comparison of all of them some microseconds, so
each function here narrows with comparisons and sorts what little is left. What a processor would have to guess at each
value, as picking by a mask, is avoided too. All are exact, ties included.
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
SAMPLE = 4096
"""Values of a sample that tells where in the whole to look."""
BEYOND = 8
"""Values of the sample to look farther than it says, because it is a sample."""


class Scratch:
    """Arrays that are used anew at every step.

    What is freed goes back to the system and comes again page by page, which takes a third as long as the arithmetic.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Values] = {}

    def array(self, name: str, size: int, dtype: npt.DTypeLike) -> Values:
        """The array of this name [size]; it holds what was last written into it."""
        known = self._kept.get(name)
        if known is None or len(known) != size or known.dtype != dtype:
            known = self._kept[name] = np.empty(size, dtype)
        return known

    def at_least(self, name: str, values: Values, least: Any) -> npt.NDArray[np.bool_]:
        """Which `values` are at least so much: [n]."""
        found: npt.NDArray[np.bool_] = np.greater_equal(values, least, out=self.array(name, len(values), np.bool_))
        return found

    def only(self, name: str, values: Values, mask: npt.NDArray[np.bool_]) -> Values:
        """The `values` where `mask` is true, else 0: [n]. A mask that is cast before takes half the time."""
        factors = self.array(name, len(values), values.dtype)
        np.copyto(factors, mask)
        return np.multiply(values, factors, out=factors)


def largest(values: Values, count: int) -> npt.NDArray[np.intp]:
    """Places of the `count` largest of `values` [n], in ascending order, and of all that equal the last of them."""
    peaks = _peaks(values)
    if count > len(peaks) // 2:
        return np.flatnonzero(values >= np.partition(values, -count)[-count])
    return _largest(values, peaks, count)


def _largest(values: Values, peaks: Values, count: int) -> npt.NDArray[np.intp]:
    """The same, where the blocks outnumber what is wanted."""
    # So many blocks have a value of at least this, so the last one that is wanted is not below it.
    near = np.flatnonzero(values >= np.partition(peaks, -count)[-count])
    found = values[near]
    chosen: npt.NDArray[np.intp] = near[found >= np.partition(found, -count)[-count]]
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


def _sum(values: Values) -> float:
    """The sum of `values`."""
    rows, rest = _rows(values)
    return float(rows.sum(axis=0).sum(dtype=np.float64) + rest.sum(dtype=np.float64))


def nucleus(weights: Values, share: float, scratch: Scratch | None = None) -> Values:
    """The largest `weights` [n], none negative, that together first reach `share` of the sum; 0 for others: [n].

    Of equal ones at the edge, those that come first are taken; at least one is. With `scratch` the result is valid
    until its next use.
    """
    scratch = scratch or Scratch()
    total = _sum(weights)
    near = _near(weights, share * total)
    if near is None:
        return _wide(weights, share, total, scratch)
    few = weights[near]
    taken = near[_up_to(few, 0.0, share * total)]
    kept = scratch.array("kept", len(weights), weights.dtype)
    kept.fill(0)
    kept[taken] = weights[taken]
    return kept


def _near(weights: Values, limit: float) -> npt.NDArray[np.intp] | None:
    """Places of some of the largest weights that surely reach `limit`; None where that takes more than a few."""
    if len(weights) <= FEW:
        return np.arange(len(weights))
    peaks = _peaks(weights)
    if len(peaks) < 2 * GUESS or float(np.partition(peaks, -GUESS)[-GUESS:].sum(dtype=np.float64)) < limit:
        return None
    return _largest(weights, peaks, GUESS)


def _wide(weights: Values, share: float, total: float, scratch: Scratch) -> Values:
    """A nucleus of many: cut where a sample says, and put right what is too much or too little."""
    limit, step = share * total, max(len(weights) // SAMPLE, 1)
    sample = np.sort(weights[::step])
    sums = np.cumsum(sample, dtype=np.float64)
    # What is left out is told better by a sample than what is taken, of which a few may be most.
    place = min(int(np.searchsorted(sums, (total - limit) / step)), len(sample) - 1)
    edge = sample[place]
    inside = scratch.at_least("inside", weights, edge)
    kept = scratch.only("kept", weights, inside)
    above = _sum(kept)
    toward = 1 if above >= limit else -1  # with too much, what is just above the edge is to be decided anew
    reach = 1.5 * abs(above - limit) / step
    while True:
        end = int(np.searchsorted(sums, sums[place] + toward * reach)) + toward * BEYOND
        past = not 0 <= end < len(sample)
        far = (np.inf if toward > 0 else 0) if past else sample[end]
        between = scratch.at_least("between", weights, far)
        np.logical_xor(between, inside, out=between)
        undecided = np.flatnonzero(between)
        open_ = weights[undecided]
        held = float(open_.sum(dtype=np.float64))
        before = above - held if toward > 0 else above
        if past or before < limit <= before + held:
            break
        reach *= 4
    chosen = _up_to(open_, before, limit)
    if toward > 0:
        kept[undecided[~chosen]] = 0
    else:
        kept[undecided[chosen]] = open_[chosen]
    return kept


def _up_to(open_: Values, before: float, limit: float) -> npt.NDArray[np.bool_]:
    """Which of `open_`, the largest first, are taken until a sum that begins at `before` reaches `limit`."""
    ordered = np.sort(open_)[::-1]
    sums = np.cumsum(ordered, dtype=np.float64) - ordered + before
    wanted = int(np.count_nonzero(sums < limit))
    if wanted == 0:
        wanted = int(before == 0)
    if wanted == 0:
        return np.zeros(len(open_), np.bool_)
    least = ordered[wanted - 1]
    return _first_of_equals(open_, least, int(np.count_nonzero(ordered[:wanted] == least)))


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
