"""What a decode step costs by its width, as measured while it runs; nothing is known of a provider beforehand.

What was not measured yet is taken to lie on the line through what was, and on a cautious one before that.
"""

from __future__ import annotations

from collections import deque

KEPT = 15
"""Latest steps of a width that count: a text grows, and attention with it."""
EVERY = 5
"""Steps after which what is typical is found anew: sorting in every one would cost what guesses bring."""
QUARTILE = 4
"""What counts of them is the lower quartile: whatever else a machine does only adds to the time of a step."""
SLOPE = 0.4
"""What each further token is thought to add, in steps of one token, until it is measured. Measured figures are from
0.05 (weights read from memory) to 0.6 (weights of 4 bits in a cache of the processor).
"""


class StepCosts:
    """Seconds of a step by S, the tokens that it feeds."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}
        """The quartile of each width."""
        self._firsts: set[int] = set()
        self._since = 0
        """Steps since the last time that something was found anew."""
        self._told: dict[int, float] = {}
        """Answers, until another step was seen."""
        self.since_plain = 0
        """Steps of several tokens since the last one of one."""

    def add(self, width: int, seconds: float) -> None:
        """A step of this width took so long. The first of a width, for which buffers were made, gives way to others."""
        seen = self._seen.setdefault(width, deque(maxlen=KEPT))
        if width in self._firsts:
            seen.clear()
            self._firsts.discard(width)
        elif not seen:
            self._firsts.add(width)
        seen.append(seconds)
        self.since_plain = self.since_plain + 1 if width > 1 else 0
        self._since += 1
        if len(seen) < KEPT or self._since >= EVERY or width not in self._typical:
            self._since = 0
            self._settle(width)

    def forget_worst(self) -> None:
        """Forget the slowest step of each width with guesses: what looks dear is not made, so it would look so for
        ever, also where the process only had to wait.
        """
        for width in [width for width in self._seen if width > 1]:
            self._seen[width].remove(max(self._seen[width]))
            self._settle(width)

    def _settle(self, width: int) -> None:
        seen = self._seen[width]
        self._told.clear()
        if seen:
            self._typical[width] = sorted(seen)[len(seen) // QUARTILE]
            return
        del self._seen[width], self._typical[width]
        self._firsts.discard(width)

    @property
    def known(self) -> bool:
        """Whether a step of one token has been seen to compare with, and not only the first of them."""
        return self.settled(1)

    def settled(self, width: int) -> bool:
        """Whether steps of this width have been seen, and not only the first of them."""
        return width in self._seen and width not in self._firsts

    def of(self, width: int) -> float:
        """Seconds of a step of this width; a step of one token must have been seen."""
        if width not in self._told:
            self._told[width] = self._estimate(width)
        return self._told[width]

    def _estimate(self, width: int) -> float:
        one = self._typical[1]
        if self.settled(width):
            return max(self._typical[width], one)
        settled = [seen for seen in self._seen if self.settled(seen)]
        below = max((seen for seen in settled if seen < width), default=1)
        above = min((seen for seen in settled if seen > width), default=None)
        if above is not None:
            low, high = self.of(below), self.of(above)
            return low + (high - low) * (width - below) / (above - below)
        slope = (self.of(below) - one) / (below - 1) if below > 1 else SLOPE * one
        return self.of(below) + max(slope, 0.0) * (width - below)
