"""The number of draft tokens per step: 0, 2, 4 or 8, by expected tokens over measured time.

With acceptance rate a, a step with k draft tokens gives E(k) = 1 + a + ... + a^k tokens per row (Leviathan et al.,
arXiv 2211.17192). The best k has the largest E(k) / t(k), where t(k) is the measured time of such a step, drafting
included. When k = 0 is the best, drafting is off for 32 steps, then tried again with two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.runtime.engine.drafting import Verified

COUNTS = (0, 2, 4, 8)
OFF_STEPS = 32
EMPTY_STEPS = 8
"""Steps without drafting after one in which the drafters proposed nothing."""
REFRESH_STEPS = 64
"""Steps with draft tokens after which one without is measured again."""
PRIOR, PRIOR_WEIGHT = 0.8, 1.0
"""Acceptance rate before any draft token was verified, and the number of tokens that it counts for."""
FADE = 0.95
"""Weight of earlier draft tokens after each new one."""
NEWEST = 0.2
"""Weight of the newest time in the average."""
OUTLIER = 3.0
"""A step counts as at most so many times the average: a longer one waited for another process."""
SLOPE = 0.2
"""Assumed cost of a draft token before it is measured, in steps without any."""
MARGIN = 1.02
"""Least gain that is worth draft tokens."""


class DraftLength:
    """Chooses the number of draft tokens for the rows of one package. See `engine.drafting.DraftControl`."""

    def __init__(self) -> None:
        self._by_rows: dict[int, _Measured] = {}

    def count(self, live: int) -> int:
        """Draft tokens per row for the next step of `live` rows; 0 for none."""
        return self._of(live).count()

    def record(self, live: int, drafted: int, seconds: float, verified: Sequence[Verified]) -> None:
        """A decode step with `drafted` tokens per row took `seconds`, drafting included."""
        self._of(live).record(drafted, seconds, verified)

    def _of(self, live: int) -> _Measured:
        return self._by_rows.setdefault(live, _Measured())


class _Measured:
    """Times and acceptance for one number of rows."""

    def __init__(self) -> None:
        self._accepted = self._judged = 0.0
        self._seconds: dict[int, float] = {}
        """Average time of a step by its draft tokens."""
        self._made: set[int] = set()
        """Numbers of draft tokens whose first step, which allocates buffers, is over."""
        self._off = 0
        """Steps for which drafting stays off."""
        self._since_plain = 0
        self._asked = False
        """Draft tokens were requested for the current step."""

    def count(self) -> int:
        self._asked = False
        if self._off:
            self._off -= 1
            return 0
        if 0 not in self._seconds or self._since_plain >= REFRESH_STEPS:
            return 0
        counts = COUNTS if self._judged else COUNTS[:2]
        best = max(counts, key=self._tokens_per_second)
        if best and self._tokens_per_second(best) > MARGIN * self._tokens_per_second(0):
            self._asked = True
            return best
        self._off = OFF_STEPS
        self._accepted = self._judged = 0.0
        self._seconds = {0: self._seconds[0]}
        return 0

    def record(self, drafted: int, seconds: float, verified: Sequence[Verified]) -> None:
        for row in verified:
            # Tokens after the first rejected one were not judged.
            judged = min(row.accepted + 1, row.drafted)
            fade = FADE**judged
            self._accepted = self._accepted * fade + row.accepted
            self._judged = self._judged * fade + judged
        if self._asked and not drafted:
            self._off = EMPTY_STEPS
        self._since_plain = self._since_plain + 1 if drafted else 0
        if drafted in COUNTS and drafted in self._made:
            average = self._seconds.get(drafted, seconds)
            self._seconds[drafted] = average + NEWEST * (min(seconds, OUTLIER * average) - average)
        self._made.add(drafted)

    def _tokens_per_second(self, count: int) -> float:
        rate = (self._accepted + PRIOR * PRIOR_WEIGHT) / (self._judged + PRIOR_WEIGHT)
        return sum(rate**place for place in range(count + 1)) / self._time(count)

    def _time(self, count: int) -> float:
        """Seconds of a step; one that was not measured is on the line through those without and with fewer tokens."""
        if count in self._seconds:
            return self._seconds[count]
        plain, fewer = self._seconds[0], max(known for known in self._seconds if known < count)
        slope = (self._seconds[fewer] - plain) / fewer if fewer else SLOPE * plain
        return plain + max(slope, 0.0) * count
