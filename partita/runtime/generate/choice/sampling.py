"""Sampling of the next token, with the semantics of transformers' logits processors of the same names.

Order: repetition penalty, temperature, top k, top p, min p. Each function handles one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from partita.options.fields import check_fields
from partita.options.generation import GREEDY, Sampling

Values = npt.NDArray[Any]
"""[n], float32 or float64."""
Places: TypeAlias = npt.NDArray[np.intp]
"""[n]."""
BLOCK = 1024
"""Above four times this size, block sums are searched first, because a cumulative sum of all values is slow."""
SPARSE = 8
"""Zero weights are removed only if at most one in this many weights is left."""


def largest(values: Values, count: int) -> Places:
    """Indices of the `count` largest of `values` [n] and of all equal to the last of them, ascending."""
    return np.flatnonzero(values >= np.partition(values, -count)[-count])


def nucleus(weights: Values, share: float, least: float) -> tuple[Places | None, Values]:
    """The nucleus of `weights` [n] (none negative), without weights below `least`: its ascending indices and weights.

    The nucleus is the smallest set of largest weights that reaches `share` of the total; of equal weights at its edge,
    the first are included. Indices None: all places, where excluded weights are 0.
    """
    total = float(weights.sum())
    # Weights below this value sum to less than the excluded share; 0.999 for rounding.
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
    """An index into `weights` [n] (none negative), drawn in proportion to them. `uniform`: in [0, 1)."""
    return _reaches(weights, uniform * float(weights.sum()), "right")  # `right`: never a weight of 0


def _reaches(values: Values, target: float, side: Literal["left", "right"]) -> int:
    """Where the cumulative sum of `values` reaches (left) or exceeds (right) `target`; else the last value above 0."""
    begin = 0
    if len(values) > 4 * BLOCK:
        bounds = np.cumsum(np.add.reduceat(values, np.arange(0, len(values), BLOCK)), dtype=np.float64)
        block = _first(bounds, target, side)
        target -= bounds[block - 1] if block else 0.0
        begin = block * BLOCK
    return begin + _first(np.add.accumulate(values[begin : begin + 4 * BLOCK].astype(np.float64)), target, side)


def _first(bounds: npt.NDArray[np.float64], target: float, side: Literal["left", "right"]) -> int:
    place = int(bounds.searchsorted(target, side))
    return place if place < len(bounds) else int(bounds.searchsorted(bounds[-1]))


Logits = npt.NDArray[np.float32]
"""[vocab]."""
Ids = npt.NDArray[np.int64]
Sampler = Callable[[Logits, Ids], int]
"""Returns the next token from a row's logits and all its tokens, prompt included; both are read-only."""

MOST_DRAWN = 50
"""With at most this many candidates, a draw needs only the largest logits: transformers' default of top k."""
FLOAT32_MAX = np.finfo(np.float32).max


def make_sampler(options: Sampling = GREEDY) -> Sampler:
    """The sampler for these options; None disables an option. Without a seed, draws are not reproducible.

    Raises UsageError for a value out of range.
    """
    full = check_fields(options).with_defaults(GREEDY)
    penalty = full.repetition_penalty or 1.0
    if not full.temperature:
        if penalty == 1:
            return greedy
        return lambda logits, history: greedy(_penalised(logits, history, penalty), history)
    random = np.random.Generator(np.random.PCG64(full.seed)).random
    return Draws(random, full.temperature, full.top_k or 0, full.top_p or 1.0, full.min_p or 0.0, penalty)


def greedy(logits: Logits, history: Ids) -> int:
    """The most likely token; of equal ones, the first."""
    return int(logits.argmax())


@dataclass(frozen=True, slots=True)
class Draws:
    """A sampler that draws from the filtered distribution."""

    random: Callable[[], float]
    """Returns numbers in [0, 1)."""
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __call__(self, logits: Logits, history: Ids) -> int:
        """A token drawn from all logits."""
        return self._draw_token(*self.distribution(logits, history))

    @property
    def candidate_count(self) -> int:
        """The number of largest logits (and those equal to the last) that suffice; 0: all are needed."""
        few = self.repetition_penalty == 1 and 0 < self.top_k <= MOST_DRAWN
        return self.top_k if few else 0

    def choose_from(self, places: Ids, logits: Logits) -> int:
        """The same token from `candidate_count` candidates: ascending token ids and their logits."""
        return self._draw_token(*self._narrowed(places, logits))

    def distribution(self, logits: Logits, history: Ids) -> tuple[Places | None, Logits]:
        """Ascending token ids and their weights relative to the most likely token (1); ids None for all of [vocab].

        Includes every token that can be drawn; others have weight 0. float32, as in transformers.
        """
        score = _penalised(logits, history, self.repetition_penalty)
        if not 0 < self.top_k < len(score):
            return self._narrowed(None, score)
        places = largest(score, self.top_k)
        return self._narrowed(places, score[places])

    def _narrowed(self, places: Places | None, scores: Logits) -> tuple[Places | None, Logits]:
        """The distribution of the tokens that top k has kept, from their scores."""
        with np.errstate(over="ignore", under="ignore"):  # a difference beyond float32 is minus infinity: weight 0
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

    def _draw_token(self, places: Places | None, weights: Logits) -> int:
        place = draw(weights, self.random())
        return place if places is None else int(places[place])


def _penalised(logits: Logits, history: Ids, penalty: float) -> Logits:
    """Logits, float32 [vocab], in which tokens of `history` are less likely (`penalty` > 1) or more likely (< 1)."""
    if penalty == 1 or not len(history):
        return logits
    score = logits.copy()
    seen = logits[history]
    with np.errstate(over="ignore"):
        changed = np.where(seen < 0, seen * np.float32(penalty), seen / np.float32(penalty))
    score[history] = np.clip(changed, -FLOAT32_MAX, FLOAT32_MAX)
    return score


# --- log-probabilities -----------------------------------------------------------------------------------------------

IMPOSSIBLE = -9999.0
"""Log-probability of a token of probability 0, as in OpenAI's API; JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token and its natural log-probability, at least `IMPOSSIBLE`.

    It is of the model's own distribution, before temperature, penalty and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log-probabilities, most likely first; as many as requested."""


class RecordingSampler:
    """A sampler that records the log-probabilities of its choices."""

    def __init__(self, sampler: Sampler, top: int) -> None:
        """`top`: number of most likely tokens to record with each choice."""
        self._sampler, self._top = sampler, top
        self._records: list[TokenLogprobs] = []

    def __call__(self, logits: Logits, history: Ids) -> int:
        """Choose the next token as the sampler does."""
        token = self._sampler(logits, history)
        self._records.append(token_logprobs(logits, token, self._top))
        return token

    def take_records(self) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities recorded since the last call."""
        seen, self._records = tuple(self._records), []
        return seen


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """The log-probability of `token` under softmax of `logits` [vocab], and those of the `top` most likely tokens.

    Computed in float64. Equal values are ordered by id, as in greedy decoding.
    """
    scores = logits.astype(np.float64)
    best = float(scores.max())
    total = best + float(np.log(np.exp(scores - best).sum()))
    count = min(top, len(scores))
    own = max(float(scores[token]) - total, IMPOSSIBLE)
    if not count:
        return TokenLogprobs(token, own)
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    places = np.flatnonzero(scores >= least)
    order = places[np.argsort(-scores[places], kind="stable")][:count]
    likeliest = tuple((int(place), max(float(scores[place]) - total, IMPOSSIBLE)) for place in order)
    return TokenLogprobs(token, own, likeliest)
