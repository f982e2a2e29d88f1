"""Guesses of what follows, which one step confirms: who makes them, who says how many, and what is told of them.

A step that is fed a row's last token and k guesses after it gives the logits after each. The sampler takes a token of
the first, and goes on to the next while it took what was guessed. So the tokens are those without guesses, drawn or
not, and only their number per step is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


class Guessed(NamedTuple):
    """Tokens that may follow, in order. Two lists, because an object for each would take longer than to find them."""

    tokens: Sequence[int] = ()
    evidence: Sequence[int] = ()
    """Which of the guesser's classes each is of: guesses of one class prove right about equally often."""


class Guesser(Protocol):
    """Guesses what follows in one row. It is asked again and again, as the row grows or goes back."""

    def __call__(self, history: npt.NDArray[np.int64], most: int, /) -> Guessed:
        """At most `most` tokens that may follow those of a row [n], in order; none when it has no idea.

        0 of them are asked for when a prompt has been read, to get ready: that is in the time of the prompt.
        """


@runtime_checkable
class Reader(Protocol):
    """A guesser that reads a text before it can guess, as a draft model does: what it was not asked about, too."""

    def behind(self, history: npt.NDArray[np.int64], /) -> int:
        """Tokens of a row [n] that it would have to read beside the last one."""


class Judged(NamedTuple):
    """What came of the guesses of one row."""

    evidence: tuple[int, ...]
    """Of each guess that was fed."""
    confirmed: int
    """So many of them, from the first, were right, and something came after each."""
    ended: bool = False
    """The next one was right, too, and ended the row; those behind it were never tried."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A decode step as the governor hears of it."""

    width: int
    """S: the tokens that each row was fed."""
    seconds: float
    """Wall time from its plan to its last token; without `guess_seconds`."""
    guess_seconds: float
    """Wall time in which guesses were made and counted."""
    asked: int
    """Guesses that were made, be they fed or not."""
    live: int
    """Rows that went on."""
    tokens: int
    """That these rows got."""
    tested: tuple[Judged, ...]
    read: int = 0
    """Tokens that those who guess had to read before."""


class Governor(Protocol):
    """Says how many guesses are worth a step, from what steps cost and how often guesses were right."""

    def begin(self) -> None:
        """A generation begins, or a request beside which nobody is at work. What is known of steps stays."""

    def rests(self) -> bool:
        """Nobody is to look for guesses in the next step, nor tell of it. Asked once for each step."""

    def measuring(self, live: int) -> bool:
        """A step without guesses is wanted now, to compare with. `live`: rows that go on."""

    def most(self, live: int, behind: int = 0, room: int = 0) -> int:
        """Guesses per row that it is worth asking for; 0 where none is worth its time. `behind`: tokens that those who
        guess would have to read before; `room`: tokens that a row may still get.
        """

    def choose(self, offers: Sequence[tuple[int, ...]], live: int) -> int:
        """How many of these guesses are fed, at most, in each row. `offers`: the evidence of each, for every row that
        has some; empty where nobody found any. `live`: rows that go on, those without guesses included.
        """

    def heard(self, step: Heard) -> None:
        """A decode step was made."""
