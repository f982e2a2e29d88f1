"""Prompt lookup: the text goes on as it did where its last tokens stood before. Needs no second model.

Of earlier places of the last two tokens, or else of the last one, that counts where most tokens before agree, and of
equals the latest. What stood behind it is guessed. A text that repeats itself reaches into its own end; the guess goes
on with what was guessed, as decompressors do:

    history   ... a b c d e ... a b c          guesses  d e ...

Taking what stood behind most of the places in place of that was wrong more often (in 3,400 places of answers of the
embedded checkpoint); but that all of them went on alike, or not, says how likely a guess is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from partita.runtime.engine.guesses import Guess

PLACES = 24
"""Latest places of the last two tokens that are compared."""
SAME = 16
"""Tokens at the end of what is known that are compared with a text."""
LONGEST = 20
"""Tokens before a place that are compared."""
CLASSES = (1, 2, 3, 4, 6, 10, 17)
"""Guesses are told apart by how many tokens before them agree: at least so many."""
PRIORS = (0.2, 0.45, 0.55, 0.65, 0.8, 0.87, 0.93)
"""What share of them is thought to be right before any was judged."""
ALIKE, APART = 4, -1
"""What it counts for, in tokens that agree, that all places went on alike, and that some did not: after two tokens 85 %
were right where several places went on alike, 56 % where there was one, and 30 % where they went on differently.
"""
REPEATS = frozenset(5 * 2**power for power in range(16))
"""After so many tokens that stand as they did before guesses are worth a look again. Seldom, for where steps of several
tokens are dear they are not worth it, however right they are.
"""
_EVIDENCE = [max(index for index, least in enumerate(CLASSES) if least <= max(count, 1)) for count in range(18)]
Ids = npt.NDArray[np.int64]


class NgramGuesser:
    """Guesses from one row's own text. See `engine.guesses.Guesser`."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._pairs: dict[tuple[int, int], list[int]] = {}
        """By two tokens, the places after them, ascending; all but that at the end of the text."""
        self._last: dict[int, int] = {}
        """By a token, the last place after it; but not the end of the text."""
        self._place, self._agree = 0, 0
        """A place whose past agrees with the end of the text, and for how many tokens at least; 0 for none."""

    def __call__(self, history: Ids, most: int, /) -> Sequence[Guess]:
        """What followed the longest earlier occurrence of the end of the text."""
        self._follow(history)
        place, agree, sure = self._find()
        if not agree or not most:
            return ()
        text = self._text
        guesses = text[place : place + most]
        while len(guesses) < most:
            guesses.append(guesses[place - len(text)])  # what was guessed, as far back as the place is
        return [Guess(token, _class_of(sure + index)) for index, token in enumerate(guesses)]

    def repeats(self, history: Ids, /) -> bool:
        """Whether the last tokens stand as they did before, and for long enough to look again. Costs next to nothing
        where one was added.
        """
        self._follow(history)
        return self._agree in REPEATS

    def _follow(self, history: Ids) -> None:
        """Take in what is new; all of it after the row has gone back, which shows in the last tokens that are known:
        the same ones at the same place are taken for the same text, for a guess may be wrong.
        """
        text, count = self._text, len(self._text)
        if count and len(history) == count + 1 and history[-2] == text[-1]:
            self._append(int(history[-1]))
            return
        if count > len(history) or text[-SAME:] != history[max(count - SAME, 0) : count].tolist():
            self._text, self._pairs, self._last, count = [], {}, {}, 0
            self._place = self._agree = 0
        for token in history[count:].tolist():
            self._append(token)

    def _append(self, token: int) -> None:
        text = self._text
        end = len(text)
        if end:
            self._last[text[-1]] = end
        if end > 1:
            self._pairs.setdefault((text[-2], text[-1]), []).append(end)
        text.append(token)
        if self._agree and text[self._place] == token:
            self._place += 1
            self._agree += 1
            return
        places = self._pairs.get((text[-2], token)) if end else None
        self._place, self._agree = (places[-1], 2) if places else (0, 0)

    def _find(self) -> tuple[int, int, int]:
        """The place whose past agrees with the end of the text for the longest, for how many tokens, 0 for none, and
        for how many that counts as evidence.
        """
        text = self._text
        if self._agree >= LONGEST:
            return self._place, self._agree, self._agree
        places = self._pairs.get((text[-2], text[-1]), ())[-PLACES:] if len(text) > 1 else ()
        if not places:
            last = self._last.get(text[-1], 0) if text else 0
            return last, int(last > 0), int(last > 0)
        best = longest = 0
        for place in reversed(places):
            agree = _agreement(text, place)
            if agree > longest:
                best, longest = place, agree
            if longest >= LONGEST:
                break
        if len(places) == 1:
            return best, longest, longest
        token = text[best]
        return best, longest, longest + (ALIKE if all(text[place] == token for place in places) else APART)


def _agreement(text: Sequence[int], place: int) -> int:
    """How many tokens before `place` are those at the end of the text; two are known to be."""
    end, count = len(text), 2
    while count < min(LONGEST, place) and text[place - 1 - count] == text[end - 1 - count]:
        count += 1
    return count


def _class_of(agree: int) -> int:
    return _EVIDENCE[min(agree, len(_EVIDENCE) - 1)]
