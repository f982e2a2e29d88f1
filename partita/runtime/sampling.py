"""Choosing the next token from logits, with the semantics of transformers' logits processors of the same names.

The order is transformers' own: repetition penalty, temperature, top k, top p, min p. Knows one row at a time, and
nothing of models or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.errors import UsageError
from partita.runtime import selection
from partita.spelling import spelled

Logits = npt.NDArray[np.float32]
"""[vocab]."""
Ids = npt.NDArray[np.int64]
Sampler = Callable[[Logits, Ids], int]
"""Next token of a row from its logits and all its tokens so far, prompt included; both are only read."""

NO_IDS = np.empty(0, np.int64)
MOST_DRAWN = 50
"""With so many at most a draw can be among the largest logits alone: transformers' default of top k."""
LOWEST = -2300
"""Below the exponent of every score but 0: float32 begins at 2**-149, and penalties span 2**-1074 to 2**1024."""
EXACT_UP_TO = 4096
"""Tokens of a vocabulary for which float64 costs next to nothing; for 150,000 a step would take a millisecond more."""
MODERATE = 1e4
"""Temperatures and penalties up to this, and down to its inverse, are computed with in float32."""
FLOAT32_MAX = float(np.finfo(np.float32).max)


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
        return greedy if repetition_penalty == 1 else _penalised_greedy(repetition_penalty)
    filters = Filters(temperature, top_k, top_p, min_p, repetition_penalty)
    return Draws(filters, np.random.Generator(np.random.PCG64(seed)).random)


def check(name: str, value: float | None, good: bool, allowed: str) -> None:
    """Raise UsageError when an option's value is outside what is allowed. NaN is outside of everything."""
    if not good:
        raise UsageError(f"{spelled(name)} is {value}; it must be {allowed}")


def greedy(logits: Logits, history: Ids) -> int:
    """The likeliest token; the first of equals."""
    return int(logits.argmax())


def _penalised_greedy(penalty: float) -> Sampler:
    """The likeliest token once those of the history are less likely; the first of equals."""

    def take(logits: Logits, history: Ids) -> int:
        scores = _quick_scores(logits, history, len(logits), penalty)
        return int((_scores(logits, history, penalty)[0] if scores is None else scores[0]).argmax())

    return take


@dataclass(frozen=True, slots=True)
class Filters:
    """What narrows the distribution before a token is drawn."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    spare: list[Logits] = field(default_factory=list, compare=False, repr=False)
    """What is used anew at every step: freed, it goes back to the system and comes again page by page."""

    def draw(self, logits: Logits, history: Ids, random: Callable[[], float]) -> int:
        """A token; `random` gives numbers from 0 to below 1, as many as it takes."""
        places, weights = self.weights(logits, history)
        place = selection.draw(weights, random, self.top_p, self.min_p)  # the largest weight is 1
        return place if places is None else int(places[place])

    def draw_among(self, places: Ids, logits: Logits, vocab: int, random: Callable[[], float]) -> int:
        """The token that `draw` takes, of what top k leaves of a vocabulary: ascending places, and the logits there.

        Only without a penalty, which would have changed what is left.
        """
        values, far = self._distances(logits, NO_IDS, vocab)
        return int(places[selection.draw(_weights(far, values), random, self.top_p, self.min_p)])

    def weights(self, logits: Logits, history: Ids) -> tuple[selection.Places | None, npt.NDArray[Any]]:
        """The tokens that top k leaves, ascending, and how likely each is beside the likeliest, which weighs 1; None
        and all [vocab] without top k. Valid until the next call.

        float64, and float32 where the vocabulary is large and no setting extreme, as transformers computes.
        """
        score, far = self._distances(logits, history, len(logits))
        kept = selection.largest(score, self.top_k) if 0 < self.top_k < len(score) else None
        return kept, _weights(far, score if kept is None else score[kept])

    def _distances(
        self, logits: Logits, history: Ids, vocab: int
    ) -> tuple[npt.NDArray[Any], Callable[[npt.NDArray[Any]], npt.NDArray[Any]]]:
        """Penalised scores of logits out of a vocabulary, and what makes exponents of some of them: 0 for the largest,
        else below.
        """
        quick = _quick_scores(logits, history, vocab, self.repetition_penalty, self.temperature)
        if quick is not None:
            scores, top = quick
            factor = np.float32(1 / self.temperature)

            def far(some: Logits) -> Logits:
                if not self.spare or len(self.spare[0]) != len(some):
                    self.spare[:] = [np.empty_like(some)]
                distance: Logits = np.subtract(some, top, out=self.spare[0])
                return np.multiply(distance, factor, out=distance) if factor != 1 else distance

            return scores, far
        divisor, exponent = math.frexp(self.temperature)
        score, scale = _scores(logits, history, self.repetition_penalty, least=exponent)
        best = score.max()
        return score, lambda some: _shifted((some - best) / divisor, scale - exponent)


@dataclass(frozen=True, slots=True)
class Draws:
    """A sampler that draws."""

    filters: Filters
    random: Callable[[], float]
    """Gives numbers from 0 to below 1."""

    def __call__(self, logits: Logits, history: Ids) -> int:
        """A token, by all logits."""
        return self.filters.draw(logits, history, self.random)

    @property
    def few(self) -> int:
        """So many of the largest logits, and those that equal the last, are all it looks at; 0: it looks at all."""
        few = self.filters.repetition_penalty == 1 and 0 < self.filters.top_k <= MOST_DRAWN
        return self.filters.top_k if few else 0

    def among(self, places: Ids, logits: Logits, vocab: int) -> int:
        """The same token by these few of a vocabulary: ascending places, and the logits there."""
        return self.filters.draw_among(places, logits, vocab, self.random)


def _weights(far: Callable[[npt.NDArray[Any]], npt.NDArray[Any]], scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """How likely each of the scores is beside the likeliest, which weighs 1."""
    with np.errstate(over="ignore", under="ignore"):  # what is out of reach is minus infinity, and weighs nothing
        weight: npt.NDArray[Any] = far(scores)
        np.exp(weight, out=weight)
    return weight


def _quick_scores(
    logits: Logits, history: Ids, vocab: int, penalty: float, temperature: float = 1.0
) -> tuple[Logits, np.float32] | None:
    """Penalised logits, float32, and their largest, where that does, as in transformers. None for a small
    vocabulary, where float64 costs nothing, for extreme settings, and where float32 cannot hold the largest of them.
    """
    if vocab <= EXACT_UP_TO or not all(1 / MODERATE <= value <= MODERATE for value in (penalty, temperature)):
        return None
    scores = _penalised(logits, history, penalty)
    top = scores.max()
    return (scores, top) if abs(float(top)) * MODERATE < FLOAT32_MAX else None


def _penalised(logits: Logits, history: Ids, penalty: float) -> Logits:
    """Logits with the tokens of `history` made less likely by `penalty` > 1, likelier by one < 1: float32 [vocab]."""
    if penalty == 1 or not len(history):
        return logits
    score = logits.copy()
    seen = logits[history]
    with np.errstate(over="ignore"):
        score[history] = np.where(seen < 0, seen * np.float32(penalty), seen / np.float32(penalty))
    return score


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
