"""How likely the tokens were that a sampler chose, by the logits that it was given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partita.runtime.generate.choice.sampling import Ids, Logits, Sampler

IMPOSSIBLE = -9999.0
"""What a token of probability 0 has, as in OpenAI's API: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token and its natural log-probability, by the model's own distribution: before temperature, penalty and
    filters; no less than `IMPOSSIBLE`.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and theirs, the likeliest first: as many as were asked for."""


class Watched:
    """A sampler that takes note of how likely its choices were."""

    def __init__(self, sampler: Sampler, top: int) -> None:
        """`top`: how many of the likeliest tokens to note beside the one that is chosen."""
        self._sampler, self._top = sampler, top
        self._seen: list[TokenLogprobs] = []

    def __call__(self, logits: Logits, history: Ids) -> int:
        """Choose the next token as the sampler does."""
        token = self._sampler(logits, history)
        self._seen.append(token_logprobs(logits, token, self._top))
        return token

    def over(self, sampler: Sampler) -> Watched:
        """The same for another sampler."""
        return Watched(sampler, self._top)

    def told(self) -> tuple[TokenLogprobs, ...]:
        """What was noted since this was asked last."""
        seen, self._seen = tuple(self._seen), []
        return seen


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """The log-probability of `token` under softmax of `logits` [vocab], and the `top` likeliest with theirs.

    Computed in float64. Of equals, the lower id comes first, as the greedy choice has it.
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
