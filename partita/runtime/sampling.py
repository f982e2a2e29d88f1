"""Choosing the next token from logits, with the semantics of transformers' logits processors of the same names.

The order is transformers' own: repetition penalty, temperature, top k, top p, min p. Knows one row at a time, and
nothing of models or text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.options import GREEDY, Sampling, checked
from partita.runtime import selection

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
    filters = Filters(full.temperature, full.top_k or 0, full.top_p or 1.0, full.min_p or 0.0, penalty)
    return Draws(filters, np.random.Generator(np.random.PCG64(full.seed)).random)


def greedy(logits: Logits, history: Ids) -> int:
    """The likeliest token; the first of equals."""
    return int(logits.argmax())


def _penalised_greedy(penalty: float) -> Sampler:
    """The likeliest token once those of the history are less likely; the first of equals."""

    def take(logits: Logits, history: Ids) -> int:
        return int(_penalised(logits, history, penalty).argmax())

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

    def draw_among(self, places: Ids, logits: Logits, random: Callable[[], float]) -> int:
        """The token that `draw` takes, of what top k leaves of a vocabulary: ascending places, and the logits there.

        Only without a penalty, which would have changed what is left.
        """
        weights = self._weights(logits, logits.max())
        return int(places[selection.draw(weights, random, self.top_p, self.min_p)])

    def weights(self, logits: Logits, history: Ids) -> tuple[selection.Places | None, Logits]:
        """The tokens that top k leaves, ascending, and how likely each is beside the likeliest, which weighs 1; None
        and all [vocab] without top k. float32, as in transformers. Valid until the next call.
        """
        score = _penalised(logits, history, self.repetition_penalty)
        kept = selection.largest(score, self.top_k) if 0 < self.top_k < len(score) else None
        return kept, self._weights(score if kept is None else score[kept], score.max())

    def _weights(self, scores: Logits, top: np.float32) -> Logits:
        """How likely each of the scores is beside one of `top`, which weighs 1. Valid until the next call."""
        if not self.spare or len(self.spare[0]) != len(scores):
            self.spare[:] = [np.empty_like(scores)]
        weights = self.spare[0]
        with np.errstate(over="ignore", under="ignore"):  # a distance too large for float32 is minus infinity: weight 0
            np.subtract(scores, top, out=weights)
            if self.temperature != 1:
                np.multiply(weights, np.float32(1 / self.temperature), out=weights)
            np.exp(weights, out=weights)
        return weights


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

    def among(self, places: Ids, logits: Logits) -> int:
        """The same token by these few of a vocabulary: ascending places, and the logits there."""
        return self.filters.draw_among(places, logits, self.random)


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
