"""Stop strings, searched in streamed text."""

from __future__ import annotations

from collections.abc import Sequence

from partita.errors import UsageError

MOST_CHARACTERS = 4096
"""Maximum length of a stop string."""


def check_stops(stops: Sequence[str]) -> None:
    """Raise UsageError for a stop string that is empty, too long, or not UTF-8."""
    if not all(stops):
        raise UsageError("`stop` is empty; pass the text that stops the generation")
    if any("\ud800" <= character <= "\udfff" for stop in stops for character in stop):
        raise UsageError("`stop` is not UTF-8; remove the invalid bytes")
    longest = max(map(len, stops), default=0)
    if longest > MOST_CHARACTERS:
        raise UsageError(f"`stop` has {longest:,} characters; the maximum is {MOST_CHARACTERS:,}")


class StopStrings:
    """Holds back the end of a text while it could begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        check_stops(stops)
        self._stops, self._held = tuple(stops), ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text and return the part that is certainly before any stop string."""
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if hits:
            place, self.found = min(hits, key=lambda hit: hit[0])
            self._held = ""
            return text[:place]
        place = min((_begun(text, stop) for stop in self._stops), default=len(text))
        self._held = text[place:]
        return text[:place]

    def finish(self) -> str:
        """The held-back text, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """Start of the longest suffix of `text` that is a prefix of `stop`. `text` does not contain `stop`."""
    places = range(max(0, len(text) - len(stop) + 1), len(text))
    return next((place for place in places if stop.startswith(text[place:])), len(text))
