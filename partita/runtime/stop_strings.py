"""Texts to stop at, found in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from partita.errors import UsageError
from partita.spelling import spelled


class StopStrings:
    """Holds back the end of a text as long as it could be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise UsageError(f"{spelled('stop')} is empty; give the text to stop at")
        self._stops, self._held = [_Stop(stop) for stop in stops], ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text and return what is certainly before any stop string."""
        if self.found is not None:
            return ""
        known = len(self._held)
        self._held += text
        hits = [(known + end - len(stop.text), stop) for stop in self._stops if (end := stop.push(text)) is not None]
        if hits:
            place, stop = min(hits, key=lambda hit: hit[0])
            self.found = stop.text
            return self._release(place, forget=True)
        return self._release(len(self._held) - max((stop.begun for stop in self._stops), default=0))

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        return self._release(len(self._held))

    def _release(self, length: int, *, forget: bool = False) -> str:
        out, self._held = self._held[:length], "" if forget else self._held[length:]
        return out


class _Stop:
    """Looks for one stop string in a text that comes in pieces, each character once, however the text repeats itself:
    Knuth, Morris, Pratt, Fast Pattern Matching in Strings, SIAM J. Comput. 6 (1977).
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        """Characters of it that the end of the text has."""
        self._borders = [0]
        """By the last character of each beginning of it: how much of that beginning it ends with, too. As far as one
        was seen: a request may have a stop string of megabytes.
        """

    def push(self, piece: str) -> int | None:
        """The place in a piece of text where it ends for the first time; None where it does not."""
        text, begun = self.text, self.begun
        if not begun and text[0] not in piece:
            return None
        for end, character in enumerate(piece, 1):
            while begun and character != text[begun]:
                begun = self._borders[begun - 1]
            begun += character == text[begun]
            if begun == len(text):
                return end
            if begun > len(self._borders):
                self._borders.append(self._border(begun - 1))
        self.begun = begun
        return None

    def _border(self, last: int) -> int:
        border = self._borders[last - 1]
        while border and self.text[last] != self.text[border]:
            border = self._borders[border - 1]
        return border + (self.text[last] == self.text[border])
