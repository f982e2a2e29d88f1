"""N-gram lookup: the text goes on as it did after an earlier occurrence of its last tokens. Needs no draft model.

Of the latest earlier places of the last two tokens, the one counts before which most tokens agree, and of equals the
latest. The tokens after it are the draft. A text that repeats itself reaches into its own end; the draft then repeats:

    history   ... a b c d e ... a b c          draft  d e ...
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LONGEST = 20
"""Tokens before a place that are compared."""
PLACES = 24
"""Latest places of the last two tokens that are compared."""
SAME = 16
"""Last tokens that have to be the same for a history to count as a longer one of the same text."""
Ids = npt.NDArray[np.int64]


class NgramDrafter:
    """Draft tokens of one row, from its own text."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._pairs: dict[tuple[int, int], list[int]] = {}
        """Places after each pair of tokens, ascending, but not the end of the text."""

    def __call__(self, history: Ids, most: int, /) -> list[int]:
        """At most `most` tokens that followed the longest earlier occurrence of the end of `history` [n]."""
        self._follow(history)
        place = self._find()
        if place is None:
            return []
        found = self._text[place : place + most]
        period = len(found)
        while len(found) < most:
            found.append(found[-period])
        return found

    def _follow(self, history: Ids) -> None:
        """Index what is new of the text; all of it after the row was rewound."""
        count = len(self._text)
        same = self._text[-SAME:]
        fresh: list[int] = history[count - len(same) :].tolist()
        if fresh[: len(same)] == same:
            del fresh[: len(same)]
        else:
            fresh = history.tolist()
            self._text, self._pairs = [], {}
        text = self._text
        for token in fresh:
            if len(text) > 1:
                self._pairs.setdefault((text[-2], text[-1]), []).append(len(text))
            text.append(token)

    def _find(self) -> int | None:
        """The place whose past agrees longest with the end of the text."""
        text = self._text
        best, longest = None, 0
        for place in reversed(self._pairs.get((text[-2], text[-1]), ())[-PLACES:] if len(text) > 1 else ()):
            agree = 2
            while agree < min(LONGEST, place) and text[place - 1 - agree] == text[-1 - agree]:
                agree += 1
            if agree > longest:
                best, longest = place, agree
            if longest >= LONGEST:
                break
        return best
