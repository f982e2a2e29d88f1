"""The observation window: profile the first runs of each phase, then go on at full speed.

Knows when a window is full and how to keep what it saw; does not read the profile until facts are asked for, because a
step of the loop would pay for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from partita.observations.facts import NodeEvent, RunWindow
from partita.runtime.evidence import parse_profile
from partita.runtime.session import Session

OBSERVED_RUNS = {"prefill": 1, "decode": 4}
"""Session runs of each phase that are profiled at least."""


class Window:
    """The profiled runs of one session. `open` is True while profiling is on."""

    def __init__(self, session: Session, phases: Collection[str]) -> None:
        self.open = session.profiling
        self._session = session
        self._due = Counter({phase: OBSERVED_RUNS[phase] for phase in phases})
        self._runs: list[tuple[str, int]] = []
        self._profile: str | None = None

    def after_run(self, phase: str, new_tokens: int) -> None:
        """Count a run that was profiled, and close the window when every phase has had its runs."""
        self._runs.append((phase, new_tokens))
        self._due[phase] -= 1
        if max(self._due.values()) <= 0:
            self.close()

    def close(self) -> None:
        """Stop profiling for good and keep the profile. May be called twice, and before the window is full."""
        if self.open:
            self.open = False
            self._profile = self._session.end_profiling()

    def events(self) -> tuple[tuple[NodeEvent, ...], tuple[RunWindow, ...]]:
        """Node executions and runs that were seen; closes the window."""
        self.close()
        return parse_profile(self._profile, self._runs) if self._profile else ((), ())
