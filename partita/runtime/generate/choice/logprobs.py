"""Log-probabilities of the tokens that a sampler chooses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partita.runtime.generate.choice.sampling import Ids, Logits, Sampler

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

    def for_sampler(self, sampler: Sampler) -> RecordingSampler:
        """A recorder of the same settings for another sampler."""
        return RecordingSampler(sampler, self._top)

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
