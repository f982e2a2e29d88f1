"""What a loaded package has written before, to look up what it went on with: its answers resemble each other.

Rows of a file, requests to a server and turns of a chat ask for the same forms again and again. So the latest answers
are kept, with where each three tokens stand in them. They only ever say what to guess: a guess that is wrong costs its
time and changes no answer.
"""

from __future__ import annotations

from collections.abc import Sequence

KEPT = 65_536
"""Tokens of answers in each of two parts; both take up to 32 MiB when they are full."""
CONTEXT = 8
"""Tokens before an answer that are kept with it, so that its first ones are found."""
NEEDED = 3
"""Tokens that have to agree."""
PLACES = 8
"""Latest places of three tokens that are compared."""
LONGEST = 20
"""Tokens before a place that are compared."""


class Written:
    """The latest answers of a package, in two parts: the older one is forgotten when the other is full."""

    def __init__(self, kept: int = KEPT) -> None:
        """`kept`: tokens of a part."""
        self._kept = kept
        self._parts = [_Part()]
        """The part that grows first."""

    def add(self, answer: Sequence[int]) -> None:
        """Keep an answer, with a few tokens before it; of one that is too long its end."""
        newest = answer[-self._kept :]
        if len(self._parts[0].text) + len(newest) > self._kept:
            self._parts = [_Part(), self._parts[0]]
        self._parts[0].add(newest)

    def find(self, text: Sequence[int], beyond: int) -> tuple[Sequence[int], int, int]:
        """Where an answer agrees with the end of a text for more than `beyond` tokens: its text, the place after them,
        and how many agree; 0 for none.
        """
        found: tuple[Sequence[int], int, int] = (), 0, 0
        if len(text) >= NEEDED:
            longest, last = max(beyond, NEEDED - 1), (text[-3], text[-2], text[-1])
            for part in self._parts:
                for place in reversed(part.places.get(last, ())):
                    agree = agreement(part.text, place, text, NEEDED)
                    if agree > longest:
                        found, longest = (part.text, place, agree), agree
                        if longest >= LONGEST:
                            return found
        return found


class _Part:
    """Answers one after the other."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.places: dict[tuple[int, int, int], list[int]] = {}
        """By three tokens, the latest places after them, ascending; something stands at each."""

    def add(self, answer: Sequence[int]) -> None:
        """Three tokens of which some are of the answer before are found, too: they harm no more than a wrong guess."""
        text, places = self.text, self.places
        for token in answer:
            end = len(text)
            if end >= NEEDED:
                known = places.setdefault((text[-3], text[-2], text[-1]), [])
                known.append(end)
                if len(known) > PLACES:
                    del known[0]
            text.append(token)


def agreement(there: Sequence[int], place: int, text: Sequence[int], known: int) -> int:
    """How many tokens before a place are those at the end of a text, at most `LONGEST`; `known` of them are for sure.
    The text may be that of the place.
    """
    end, count = len(text), known
    most = min(LONGEST, place, end)
    while count < most and there[place - 1 - count] == text[end - 1 - count]:
        count += 1
    return count
