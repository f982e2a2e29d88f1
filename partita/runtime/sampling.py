"""Choosing the next token from logits, with the semantics of transformers' logits processors of the same names.

The order is transformers' own: repetition penalty, temperature, top k, top p, min p. Knows one row at a time, and
nothing of models or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from partita.errors import UsageError
from partita.spelling import spelled

Logits = npt.NDArray[np.float32]
"""[vocab]."""
Ids = npt.NDArray[np.int64]
Sampler = Callable[[Logits, Ids], int]
"""Next token of a row from its logits and all its tokens so far, prompt included; both are only read."""

LOWEST = -2300
"""Below the exponent of every score but 0: float32 begins at 2**-149, and penalties span 2**-1074 to 2**1024."""
NUCLEUS_GUESS = 256
"""The likeliest tokens that are sorted at first to find the nucleus; sorting a whole vocabulary takes milliseconds."""


def make_sampler(
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
) -> Sampler:
    """A sampler. Temperature 0 takes the likeliest token; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off.

    `seed` makes draws repeatable; None draws differently every time.
    Raises UsageError naming the option and its range.
    """
    check("temperature", temperature, 0 <= temperature < math.inf, "0 (greedy) or more, and finite")
    check("top_k", top_k, top_k >= 0, "0 (off) or more")
    check("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1 (off)")
    check("min_p", min_p, 0 <= min_p <= 1, "from 0 (off) to 1")
    penalty_is_good = 0 < repetition_penalty < math.inf
    check("repetition_penalty", repetition_penalty, penalty_is_good, "above 0 (1: off), and finite")
    check("seed", seed, seed is None or seed >= 0, "0 or more")
    if temperature == 0:
        return (
            greedy
            if repetition_penalty == 1
            else lambda logits, history: int(_scores(logits, history, repetition_penalty)[0].argmax())
        )
    filters = Filters(temperature, top_k, top_p, min_p, repetition_penalty)
    generator = np.random.Generator(np.random.PCG64(seed))

    def draw(logits: Logits, history: Ids) -> int:
        ids, probabilities = filters.candidates(logits, history)
        bounds = np.cumsum(probabilities)
        # `right` cannot land on a token of probability 0, and the last bound is never passed.
        place = int(np.searchsorted(bounds, generator.random() * bounds[-1], side="right"))
        return int(ids[min(place, len(ids) - 1)])

    return draw


def check(name: str, value: float | None, good: bool, allowed: str) -> None:
    """Raise UsageError when an option's value is outside what is allowed. NaN is outside of everything."""
    if not good:
        raise UsageError(f"{spelled(name)} is {value}; it must be {allowed}")


def greedy(logits: Logits, history: Ids) -> int:
    """The likeliest token; the first of equals."""
    return int(logits.argmax())


@dataclass(frozen=True, slots=True)
class Filters:
    """What narrows the distribution before a token is drawn."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def candidates(self, logits: Logits, history: Ids) -> tuple[Ids, npt.NDArray[np.float64]]:
        """Token ids that can be drawn, and the probability of each. Sums to 1."""
        divisor, exponent = math.frexp(self.temperature)
        score, scale = _scores(logits, history, self.repetition_penalty, least=exponent)
        ids = np.arange(len(score))
        if 0 < self.top_k < len(score):
            ids = np.flatnonzero(score >= np.partition(score, -self.top_k)[-self.top_k])
        with np.errstate(over="ignore", under="ignore"):  # what is out of reach is minus infinity, and weighs nothing
            weight = np.exp(_shifted((score[ids] - score.max()) / divisor, scale - exponent))
        if self.top_p < 1:
            chosen = _nucleus(weight, self.top_p)
            ids, weight = ids[chosen], weight[chosen]
        if self.min_p > 0:
            likely = weight >= self.min_p  # the largest weight is 1
            ids, weight = ids[likely], weight[likely]
        return ids, weight / weight.sum()


def _scores(
    logits: Logits, history: Ids, penalty: float, *, least: int | None = None
) -> tuple[npt.NDArray[np.float64], int]:
    """Logits with the tokens of `history` made less likely by `penalty` > 1, or likelier by one < 1; and a scale.

    float64 [vocab], to be multiplied by two to the power of the scale. A penalty of 1e-320 makes scores that no float
    can hold, so they come in units of the largest one, or of two to the power of `least` where that is larger: what is
    too far below the largest one to be told in such units is minus infinity or equal to its like.
    """
    if penalty == 1 or not len(history):
        return logits.astype(np.float64), 0
    seen = logits[history].astype(np.float64)
    rest = logits.astype(np.float64)
    rest[history] = -np.inf
    factor, power = math.frexp(penalty)
    fraction, exponents = np.frexp(seen)
    negative = seen < 0
    fraction = np.where(negative, fraction * factor, fraction / factor)
    exponents = np.where(negative, exponents + power, exponents - power)
    # Larger logits have larger scores among those of the history, so one of these two is the largest of all.
    place, other = int(seen.argmax()), float(rest.max())
    mine = (float(fraction[place]), int(exponents[place]))
    scale = _exponent_of(other) if mine[0] == -math.inf or _below(mine, other) else _exponent_of(mine[0]) + mine[1]
    scale = scale if least is None else max(scale, least)
    with np.errstate(over="ignore", under="ignore"):
        score: npt.NDArray[np.float64] = _shifted(rest, -scale)
        score[history] = np.ldexp(fraction, exponents - scale)
    return score, scale


def _shifted(values: npt.NDArray[np.float64], power: int) -> npt.NDArray[np.float64]:
    """The values times two to the power of `power`; a product is quicker, where the power is a float."""
    return values * 2.0**power if abs(power) < 1000 else np.ldexp(values, power)


def _below(score: tuple[float, int], other: float) -> bool:
    """Whether fraction * 2**exponent is less than `other`, however large or small it is."""
    if other == -math.inf:
        return False
    return Fraction(score[0]) * Fraction(2) ** score[1] < Fraction(other)


def _exponent_of(value: float) -> int:
    """The power of two just above `value`. Of zero it is so low that everything below zero is told from it."""
    return math.frexp(value)[1] if value else LOWEST


def _nucleus(weight: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.intp]:
    """Places of the likeliest tokens that together first reach `top_p`; at least one. `weight` as of `weights`."""
    limit, count = top_p * weight.sum(), len(weight)
    size = min(NUCLEUS_GUESS, count)
    while True:
        places = np.argpartition(weight, count - size)[count - size :]
        places = places[np.argsort(-weight[places], kind="stable")]
        likelier = np.cumsum(weight[places]) - weight[places]
        inside = int(np.count_nonzero(likelier < limit))
        if inside < size or size == count:
            return np.sort(places[: max(inside, 1)])
        size = min(size * 8, count)
