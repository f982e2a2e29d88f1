"""How the next tokens are chosen: what was asked, and that with a value for everything."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

from partita.library.plain import plain
from partita.runtime.sampling import Sampler, make_sampler
from partita.runtime.suggested import Suggestion

MAX_NEW_TOKENS = 128
"""Where neither the caller nor the checkpoint says."""
CHECKPOINT = "checkpoint"
"""The source that takes what the checkpoint suggests."""
SEED_BITS = 32


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, and how often. None: not asked, which is greedy, or as the checkpoint suggests."""

    temperature: float | None = None
    """0 takes the likeliest token."""
    top_k: int | None = None
    """0: off."""
    top_p: float | None = None
    """1: off."""
    min_p: float | None = None
    """0: off."""
    repetition_penalty: float | None = None
    """1: off."""
    seed: int | None = None
    """None: drawn, and kept in the report."""
    max_new_tokens: int | None = None
    source: str | None = None
    """`checkpoint`: what was not asked is as the checkpoint suggests."""

    def __post_init__(self) -> None:
        """Numbers of other libraries are taken for what they are, as in arguments of functions."""
        for name in self.__slots__:
            object.__setattr__(self, name, plain(getattr(self, name)))

    def sampler(self) -> Sampler:
        """The function that chooses; what was not asked is off. Raises UsageError for a value out of range."""
        return make_sampler(
            temperature=self.temperature or 0.0,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            seed=self.seed,
        )

    def figures(self) -> dict[str, Any]:
        """The options as a dict, without `source`."""
        return {name: value for name, value in asdict(self).items() if name != "source"}

    def over(self, other: Sampling) -> Sampling:
        """This one, with what it does not ask for as `other` has it."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(other, **given)


def completed(asked: Sampling, suggests: Suggestion) -> Sampling:
    """The sampling with a value for everything; what was not asked is as `suggests` has it.

    A run that draws gets a seed where none was given, so that it can be repeated. Raises UsageError.
    """
    suggested = Sampling(
        suggests.temperature,
        suggests.top_k,
        suggests.top_p,
        suggests.min_p,
        suggests.repetition_penalty,
        max_new_tokens=suggests.max_new_tokens or MAX_NEW_TOKENS,
    )
    full = asked.over(suggested)
    full.sampler()
    return replace(full, seed=secrets.randbits(SEED_BITS)) if full.temperature and full.seed is None else full


def ignored(full: Sampling, asked: Sampling) -> tuple[str, ...]:
    """Fields that were asked for and that a greedy choice does not look at. `full`: `asked`, completed."""
    if full.temperature:
        return ()
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None}
    return tuple(name for name, value in off.items() if getattr(asked, name) not in (None, value))
