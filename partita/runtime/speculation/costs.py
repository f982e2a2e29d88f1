"""What a decode step costs by its width, as measured while it runs, and before that by a few runs of each (`warming`).

What was not measured at all is taken to lie on the line through what was, and on a cautious one before that.

A step takes longer after a wide one: what the processor had at hand is gone (int4 weights of 3 MB on two cores: a
quarter more after four tokens, half after eight). That is part of what the wide one costs, and says nothing of a step
of one token, with which all are compared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

KEPT = 15
"""Latest steps of a width that count: a text grows, and attention with it."""
EVERY = 5
"""Steps after which what is typical is found anew: sorting in every one would cost what guesses bring."""
QUARTILE = 4
"""What counts of them is the lower quartile: whatever else a machine does only adds to the time of a step."""
DOUBT = 0.3
"""What is left of the belief in runs before a generation that were dear, each time that what is dear is forgotten; down
to what would be thought without them.
"""
SLOPE = 0.4
"""What each further token is thought to add, in steps of one token, until it is measured. Measured figures are from
0.05 (weights read from memory) to 0.6 (weights of 4 bits in a cache of the processor).
"""
LATER = 0.1
"""The same of what each further token adds to the step of one token after it."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """Seconds of runs that were made to measure, before a generation."""

    plain: float
    """Of a run of one token."""
    wide: dict[int, float] = field(default_factory=dict)
    """By S, of a run of so many, after one of one token."""
    after: dict[int, float] = field(default_factory=dict)
    """By S, of a run of one token after it."""


class StepCosts:
    """Seconds of a step by S, the tokens that it feeds."""

    def __init__(self, warmed: Warmed | None = None) -> None:
        self._warmed, self._faith = warmed, 1.0
        """And how much of what guesses cost by it is believed."""
        self._seen: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}
        """The quartile of each width."""
        self._after: dict[int, deque[float]] = {}
        """Of steps of one token, by the width of the one before."""
        self._firsts: set[int] = set()
        self._since = 0
        """Steps since the last time that something was found anew."""
        self._told: dict[int, float] = {}
        """Answers, until another step was seen."""
        self.since_plain = 0
        """Steps since the last one of one token after another such."""

    def begin(self) -> None:
        """Another text begins, which is shorter or longer: what was seen of earlier ones counts for one step each."""
        for width in self._seen:
            if self.settled(width):
                self._seen[width] = deque([self._typical[width]], maxlen=KEPT)

    def add(self, width: int, seconds: float, before: int = 1) -> None:
        """A step of this width took so long, after one of the width `before`. The first of a width, for which buffers
        were made, gives way to others, unless some were run before.
        """
        self.since_plain += 1
        if before > 1 and self.known:
            if width == 1:
                self._after.setdefault(before, deque(maxlen=KEPT)).append(seconds)
                self._told.clear()
                return
            seconds = max(seconds - self.excess(before), 0.0)
        seen = self._seen.setdefault(width, deque(maxlen=KEPT))
        if width in self._firsts:
            seen.clear()
            self._firsts.discard(width)
        elif not seen and not self._warm(width):
            self._firsts.add(width)
        seen.append(seconds)
        if width == 1:
            self.since_plain = 0
        self._since += 1
        if len(seen) < KEPT or self._since >= EVERY or width not in self._typical:
            self._since = 0
            self._settle(width)

    def forget_worst(self) -> None:
        """Forget the slowest step of each width with guesses: what looks dear is not made, so it would look so for
        ever, also where the process only had to wait. What was measured before any generation is believed less, too.
        """
        self._faith *= DOUBT
        self._told.clear()
        for width in [width for width in self._seen if width > 1]:
            self._seen[width].remove(max(self._seen[width]))
            self._settle(width)

    def _settle(self, width: int) -> None:
        seen = self._seen[width]
        self._told.clear()
        if seen:
            self._typical[width] = _typical(seen)
            return
        del self._seen[width], self._typical[width]
        self._firsts.discard(width)

    def _warm(self, width: int) -> bool:
        return self._warmed is not None and (width == 1 or width in self._warmed.wide)

    @property
    def known(self) -> bool:
        """Whether a step of one token has been seen to compare with, and not only the first of them."""
        return self.settled(1)

    def settled(self, width: int) -> bool:
        """Whether steps of this width have been seen, and not only the first of them."""
        return width in self._seen and width not in self._firsts

    def familiar(self, width: int) -> bool:
        """Whether the buffers for steps of this width are there, so that the next one takes no longer than others."""
        return self.settled(width) or self._warm(width)

    def of(self, width: int) -> float:
        """Seconds of a step of this width, with what it costs the one after it; a step of one token must have been
        seen.
        """
        if width not in self._told:
            self._told[width] = self._estimate(width) + (self.excess(width) if width > 1 else 0.0)
        return self._told[width]

    def excess(self, width: int) -> float:
        """Seconds that a step of one token takes longer after one of this width."""
        one = self._typical[1]
        if width in self._after:
            return max(_typical(self._after[width]) - one, 0.0)
        warmed = self._warmed
        if warmed is not None and width in warmed.after:
            return self._believed(warmed.after[width] - warmed.plain, LATER * one * (width - 1))
        if not self._after:
            return 0.0
        near = min(self._after, key=lambda seen: abs(seen - width))
        return max(_typical(self._after[near]) - one, 0.0) * min((width - 1) / (near - 1), 2.0)

    def _believed(self, more: float, cautious: float) -> float:
        """What runs before a generation took longer, as far as it is believed."""
        return max(more, 0.0) if more <= cautious else max(more * self._faith, cautious)

    def _estimate(self, width: int) -> float:
        one = self._typical[1]
        if self.settled(width):
            return max(self._typical[width], one)
        warmed = self._warmed
        if warmed is not None and width in warmed.wide:
            return one + self._believed(warmed.wide[width] - warmed.plain, SLOPE * one * (width - 1))
        known = {seen for seen in self._seen if self.settled(seen)} | set(() if warmed is None else warmed.wide)
        below = max((seen for seen in known if seen < width), default=1)
        above = min((seen for seen in known if seen > width), default=None)
        low = self._estimate(below) if below > 1 else one
        if above is not None:
            return low + (self._estimate(above) - low) * (width - below) / (above - below)
        slope = (low - one) / (below - 1) if below > 1 else SLOPE * one
        return low + max(slope, 0.0) * (width - below)


def _typical(seen: deque[float]) -> float:
    return sorted(seen)[len(seen) // QUARTILE]
