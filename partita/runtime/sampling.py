"""Choosing the next token from logits, with the semantics of transformers' logits processors of the same names.

The order is transformers' own: repetition penalty, temperature, top k, top p, min p. Knows one row at a time, and
nothing of models or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.errors import UsageError

Logits = npt.NDArray[np.float32]
"""[vocab]."""
Ids = npt.NDArray[np.int64]
Sampler = Callable[[Logits, Ids], int]
"""Next token of a row from its logits and all its tokens so far, prompt included; both are only read."""

NUCLEUS_GUESS = 256
"""The likeliest tokens that are sorted at first to find the nucleus; sorting a whole vocabulary takes milliseconds."""


def make_sampler(
    temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0,
    seed: int | None = None,
) -> Sampler:  # fmt: skip
    """A sampler. Temperature 0 takes the likeliest token; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off.

    `seed` makes draws repeatable; None draws differently every time. Raises UsageError naming the option and its range.
    """
    check("--temperature", temperature, 0 <= temperature <= 100, "from 0 (greedy) to 100")
    check("--top-k", top_k, top_k >= 0, "0 (off) or more")
    check("--top-p", top_p, 0 < top_p <= 1, "above 0 and at most 1 (off)")
    check("--min-p", min_p, 0 <= min_p <= 1, "from 0 (off) to 1")
    check("--repetition-penalty", repetition_penalty, 0 < repetition_penalty <= 100, "above 0 and at most 100 (1: off)")
    check("--seed", seed, seed is None or seed >= 0, "0 or more")
    if temperature == 0:
        return greedy if repetition_penalty == 1 else lambda logits, history: greedy(
            penalised(logits, history, repetition_penalty), history
        )  # fmt: skip
    filters = Filters(temperature, top_k, top_p, min_p, repetition_penalty)
    generator = np.random.Generator(np.random.PCG64(seed))

    def draw(logits: Logits, history: Ids) -> int:
        ids, probabilities = filters.candidates(logits, history)
        bounds = np.cumsum(probabilities)
        # `right` cannot land on a token of probability 0, and the last bound is never passed.
        place = int(np.searchsorted(bounds, generator.random() * bounds[-1], side="right"))
        return int(ids[min(place, len(ids) - 1)])

    return draw


def check(option: str, value: float | None, good: bool, allowed: str) -> None:
    """Raise UsageError when an option's value is outside what is allowed. NaN is outside of everything."""
    if not good:
        raise UsageError(f"{option} is {value}; it must be {allowed}")


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
        scores = penalised(logits, history, self.repetition_penalty) / np.float32(self.temperature)
        ids = np.arange(len(scores))
        if 0 < self.top_k < len(scores):
            ids = np.flatnonzero(scores >= np.partition(scores, -self.top_k)[-self.top_k])
        if self.top_p < 1:
            ids = ids[nucleus(weights(scores[ids]), self.top_p)]
        if self.min_p > 0:
            ids = ids[weights(scores[ids]) >= self.min_p]
        chosen = weights(scores[ids])
        return ids, chosen / math.fsum(chosen)


def penalised(logits: Logits, history: Ids, penalty: float) -> Logits:
    """Logits with the tokens of `history` made less likely by `penalty` > 1, or likelier by one < 1."""
    if penalty == 1:
        return logits
    seen = logits[history]
    lower = logits.copy()
    lower[history] = np.where(seen < 0, seen * np.float32(penalty), seen / np.float32(penalty))
    return lower


def weights(scores: Logits) -> npt.NDArray[np.float64]:
    """Probabilities up to a common factor; the largest is 1."""
    relative: npt.NDArray[np.float64] = np.exp(scores - scores.max(), dtype=np.float64)
    return relative


def nucleus(weight: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.intp]:
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
