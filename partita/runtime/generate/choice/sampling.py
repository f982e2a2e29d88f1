"""Choosing the next token from logits, with the semantics of transformers' logits processors of the same names.

The order is transformers' own: repetition penalty, temperature, top k, top p, min p. Knows one row at a time, and
nothing of models or text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from partita.options.fields import checked
from partita.options.sampling import GREEDY, Sampling

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


Logits = npt.NDArray[np.float32]
"""[vocab]."""
Ids = npt.NDArray[np.int64]
Sampler = Callable[[Logits, Ids], int]
"""Next token of a row from its logits and all its tokens so far, prompt included; both are only read."""

MOST_DRAWN = 50
"""With so many at most a draw can be among the largest logits alone: transformers' default of top k."""
FLOAT32_MAX = np.finfo(np.float32).max


def make_sampler(options: Sampling = GREEDY) -> Sampler:
    """The sampler of these options; what is None is off. A seed of None draws differently every time.

    Raises UsageError for a value out of range.
    """
    full = checked(options).over(GREEDY)
    penalty = full.repetition_penalty or 1.0
    if not full.temperature:
        return greedy if penalty == 1 else _penalised_greedy(penalty)
    random = np.random.Generator(np.random.PCG64(full.seed)).random
    return Draws(random, full.temperature, full.top_k or 0, full.top_p or 1.0, full.min_p or 0.0, penalty)


def greedy(logits: Logits, history: Ids) -> int:
    """The likeliest token; the first of equals."""
    return int(logits.argmax())


def _penalised_greedy(penalty: float) -> Sampler:
    """The likeliest token once those of the history are less likely; the first of equals."""

    def take(logits: Logits, history: Ids) -> int:
        return int(_penalised(logits, history, penalty).argmax())

    return take


@dataclass(frozen=True, slots=True)
class Draws:
    """A sampler that draws from the distribution that its options leave."""

    random: Callable[[], float]
    """Gives numbers from 0 to below 1."""
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __call__(self, logits: Logits, history: Ids) -> int:
        """A token, by all logits."""
        return self._drawn(*self.distribution(logits, history))

    @property
    def few(self) -> int:
        """So many of the largest logits, and those that equal the last, are all it needs; 0: it needs all."""
        few = self.repetition_penalty == 1 and 0 < self.top_k <= MOST_DRAWN
        return self.top_k if few else 0

    def among(self, places: Ids, logits: Logits) -> int:
        """The same token by these `few` of a vocabulary: ascending places, and the logits there."""
        return self._drawn(*self._narrowed(places, logits))

    def distribution(self, logits: Logits, history: Ids) -> tuple[Places | None, Logits]:
        """Tokens, ascending, and how likely each is beside the likeliest, which weighs 1; None for all of [vocab].

        All that can be drawn are among them; others weigh 0. float32, as in transformers.
        """
        score = _penalised(logits, history, self.repetition_penalty)
        if not 0 < self.top_k < len(score):
            return self._narrowed(None, score)
        places = largest(score, self.top_k)
        return self._narrowed(places, score[places])

    def _narrowed(self, places: Places | None, scores: Logits) -> tuple[Places | None, Logits]:
        """The same of the tokens that top k has left, and their scores."""
        with np.errstate(over="ignore", under="ignore"):  # a distance too large for float32 is minus infinity: weight 0
            weights: Logits = scores - scores.max()
            if self.temperature != 1:
                weights *= np.float32(1 / self.temperature)
            np.exp(weights, out=weights)
        if self.top_p >= 1 and self.min_p <= 0:
            return places, weights
        inside, weights = nucleus(weights, self.top_p, self.min_p)
        if inside is None:
            return places, weights
        return inside if places is None else places[inside], weights

    def _drawn(self, places: Places | None, weights: Logits) -> int:
        place = draw(weights, self.random())
        return place if places is None else int(places[place])


def _penalised(logits: Logits, history: Ids, penalty: float) -> Logits:
    """Logits with the tokens of `history` made less likely by `penalty` > 1, likelier by one < 1: float32 [vocab]."""
    if penalty == 1 or not len(history):
        return logits
    score = logits.copy()
    seen = logits[history]
    with np.errstate(over="ignore"):
        changed = np.where(seen < 0, seen * np.float32(penalty), seen / np.float32(penalty))
    score[history] = np.clip(changed, -FLOAT32_MAX, FLOAT32_MAX)
    return score
