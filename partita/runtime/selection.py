"""Selecting among the weights of a large vocabulary without sorting it: the largest k, a nucleus, one draw. Pure numpy.

A full sort or a cumulative sum of 150,000 values takes milliseconds, a comparison of all of them some microseconds, so
each function here narrows with comparisons and sorts what little is left. What a processor would have to guess at each
value, as picking by a mask, is avoided too. All are exact, ties included.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
"""[n], float32 or float64."""
Places: TypeAlias = npt.NDArray[np.intp]
"""[n]."""
BLOCK = 128
"""Values that are looked at as one, by their maximum or sum."""
FEW = 2048
"""So many values are sorted without further ado."""
SHARE_OF_FEW = 16
"""Of so many values one at most is taken out to be sorted; with more, all are gone through once more."""
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
    places, values = in_nucleus(weights, share, scratch)
    if places is None:
        return values
    kept = scratch.array("kept", len(weights), weights.dtype)
    kept.fill(0)
    kept[places] = values
    return kept


def in_nucleus(weights: Values, share: float, scratch: Scratch) -> tuple[Places | None, Values]:
    """The same as places, ascending, and what they weigh; where it is many, None and all [n], 0 for others."""
    total = _sum(weights)
    limit = share * total
    if len(weights) <= FEW:
        places = np.flatnonzero(_up_to(weights, 0.0, limit))
        return places, weights[places]
    sample = _Sample.of(weights, total - limit)
    near = _near(weights, limit, sample, scratch)
    if near is None:
        return None, _wide(weights, limit, sample, scratch)
    few = weights[near]
    taken = _up_to(few, 0.0, limit)
    return near[taken], few[taken]


class _Sample(NamedTuple):
    """Some of the weights, which tell where in all of them to look."""

    values: Values
    """Ascending."""
    sums: Values
    step: int
    """Of so many weights there is one."""
    place: int
    """Of the edge of the nucleus."""

    @classmethod
    def of(cls, weights: Values, outside: float) -> _Sample:
        """`outside`: the sum of what is not in the nucleus, which a sample tells better than that of what is in it, of
        which a few may be most.
        """
        step = max(len(weights) // SAMPLE, 1)
        values = np.sort(weights[::step])
        sums = np.cumsum(values, dtype=np.float64)
        return cls(values, sums, step, min(int(np.searchsorted(sums, outside / step)), len(values) - 1))


def _near(weights: Values, limit: float, sample: _Sample, scratch: Scratch) -> Places | None:
    """Places of the largest weights, enough of them to reach `limit`; None where those are many, or not found so."""
    above = len(sample.values) - sample.place
    if SHARE_OF_FEW * above > len(sample.values):
        return None
    least = sample.values[max(0, sample.place - BEYOND - above // 2)]
    least = max(least, np.finfo(weights.dtype).smallest_subnormal)  # what weighs nothing may be most of all
    near = np.flatnonzero(scratch.at_least("inside", weights, least))
    if SHARE_OF_FEW * len(near) > 2 * len(weights) or float(weights[near].sum(dtype=np.float64)) < limit:
        return None
    return near


def _wide(weights: Values, limit: float, found: _Sample, scratch: Scratch) -> Values:
    """A nucleus of many: cut where a sample says, and put right what is too much or too little."""
    sample, sums, step, place = found
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


def draw_among(places: Places, weights: Values, uniform: float) -> int:
    """The one of `places`, ascending, on which a number from 0 to below 1 falls, each as likely as it weighs.

    One that weighs nothing is never taken.
    """
    bounds = np.cumsum(weights, dtype=np.float64)
    found = int(np.searchsorted(bounds, uniform * bounds[-1], side="right"))
    return int(places[min(found, int(np.searchsorted(bounds, bounds[-1])))])


def draw(weights: Values, uniform: float) -> int:
    """The place in `weights` [n] that a number from 0 to below 1 falls on, each as likely as it weighs.

    A place of weight 0 is never taken.
    """
    whole = len(weights) // BLOCK * BLOCK
    sums = np.einsum("ij->i", weights[:whole].reshape(-1, BLOCK))  # a third of what reduceat takes
    bounds = np.cumsum(np.append(sums, weights[whole:].sum()), dtype=np.float64)
    wanted = uniform * bounds[-1]
    # `right` cannot land on what weighs nothing.
    block = min(int(np.searchsorted(bounds, wanted, side="right")), int(np.searchsorted(bounds, bounds[-1])))
    start = block * BLOCK
    inside = np.cumsum(weights[start : start + BLOCK], dtype=np.float64)
    rest = wanted - (bounds[block - 1] if block else 0.0)
    # The sums of a block are rounded in two ways; past its end is its last place that weighs something.
    place = min(int(np.searchsorted(inside, rest, side="right")), int(np.searchsorted(inside, inside[-1])))
    return start + place
