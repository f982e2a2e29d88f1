"""Prompt lookup: the text goes on as it did where its last tokens stood before. Needs no second model.

Of earlier places of the last two tokens, or else of the last one, that counts where most tokens before agree, and of
equals the latest. What stood behind it is guessed. A text that repeats itself reaches into its own end; the guess goes
on with what was guessed, as decompressors do:

    history   ... a b c d e ... a b c          guesses  d e ...
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from partita.runtime.engine.guesses import Guessed

LONGEST = 20
"""Tokens before a place that are compared."""
PLACES = 24
"""Latest places of the last two tokens that are compared."""
SAME = 16
"""Tokens at the end of what is known that are compared with a text."""
CLASSES = (1, 2, 3, 4, 6, 10, 17)
"""Classes of draft tokens: at least so many tokens before them agree."""
PRIORS = (0.2, 0.4, 0.5, 0.6, 0.75, 0.85, 0.9)
"""What share of them is thought to be right before any was judged."""
MOST = 256
"""Tokens that are guessed at once at most."""
_CLASS_AFTER = [bisect.bisect(CLASSES, agree) - 1 for agree in range(1, LONGEST + MOST)]
"""The class of a guess by the tokens before it that agree, from 1 on."""
Ids = npt.NDArray[np.int64]


class NgramGuesser:
    """Draft tokens from one row's own text. See `engine.guesses.Guesser`."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._pairs: dict[tuple[int, int], list[int]] = {}
        """By two tokens, the places after them, ascending; all but that at the end of the text."""
        self._last: dict[int, int] = {}
        """By a token, the last place after it; but not the end of the text."""

    def __call__(self, history: Ids, most: int, /) -> Guessed:
        """What followed the longest earlier occurrence of the end of the text."""
        self._follow(history)
        most = min(most, MOST)
        place, agree = self._find() if most else (0, 0)
        if not agree:
            return Guessed()
        guesses = self._text[place : place + most]
        period = len(guesses)
        while len(guesses) < most:
            guesses.append(guesses[-period])
        return Guessed(guesses, _CLASS_AFTER[agree - 1 : agree - 1 + most])

    def _follow(self, history: Ids) -> None:
        """Take in what is new; all of it after the row has gone back, which shows in the last tokens that are known:
        the same ones at the same place are taken for the same text, for a guess may be wrong.
        """
        text, count = self._text, len(self._text)
        same = text[-SAME:]
        fresh: list[int] = history[count - len(same) :].tolist()
        if fresh[: len(same)] == same:
            del fresh[: len(same)]
        else:
            text, fresh = [], history.tolist()
            self._text, self._pairs, self._last = text, {}, {}
        for token in fresh:
            end = len(text)
            if end:
                self._last[text[-1]] = end
            if end > 1:
                self._pairs.setdefault((text[-2], text[-1]), []).append(end)
            text.append(token)

    def _find(self) -> tuple[int, int]:
        """The place whose past agrees with the end of the text for the longest, and for how many tokens; 0 for none."""
        text = self._text
        best, longest = 0, 0
        if len(text) > 1:
            for place in reversed(self._pairs.get((text[-2], text[-1]), ())[-PLACES:]):
                agree = agreement(text, place, text, 2)
                if agree > longest:
                    best, longest = place, agree
                if longest >= LONGEST:
                    break
        if not longest and text and text[-1] in self._last:
            best, longest = self._last[text[-1]], 1
        return best, longest


def agreement(there: Sequence[int], place: int, text: Sequence[int], known: int) -> int:
    """The number of tokens before a place that equal those at the end of a text, at most `LONGEST`; the first `known`
    are not compared. The text may be that of the place.
    """
    end, count = len(text), known
    most = min(LONGEST, place, end)
    while count < most and there[place - 1 - count] == text[end - 1 - count]:
        count += 1
    return count
