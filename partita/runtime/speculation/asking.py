"""What guesses of a draft take to be made: a step of it for each, and before them the tokens that it has not read."""

from __future__ import annotations

import statistics
from collections import deque

KEPT = 15
"""Latest times that count."""
CAUGHT_UP = 1
"""Tokens that a draft lacks where all of its guesses were right: it has not read the last of them."""


class Asking:
    """Seconds that it takes a draft to guess."""

    def __init__(self, step: float | None = None, token: float = 0.0) -> None:
        """`step`: of the draft, None where nobody knows; `token`: per token that it reads beside others. As they were
        measured before anything was generated: what is heard later comes in their place.
        """
        self._steps = deque([] if step is None else [step], maxlen=KEPT)
        self._tokens = deque([token], maxlen=KEPT)
        self._first = True
        """What is known is of before anything was guessed."""

    @property
    def step(self) -> float | None:
        """Seconds per guess; None where none is known."""
        return statistics.median(self._steps) if self._steps else None

    def reading(self, behind: int) -> float:
        """Seconds in which it reads so many tokens."""
        return behind * statistics.median(self._tokens)

    def add(self, seconds: float, guesses: int, behind: int) -> None:
        """So many guesses took so long, with so many tokens that were read before."""
        step = self.step
        if behind <= CAUGHT_UP or step is None:
            if self._first:
                self._steps.clear()
                self._first = False
            self._steps.append(seconds / guesses)
        else:
            self._tokens.append(max(seconds - guesses * step, 0.0) / behind)
