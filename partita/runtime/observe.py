"""The observation window: profile the first runs of each phase, then go on at full speed.

Knows when a window is full and how to keep what it saw; does not read the profile until facts are asked for, because a
step of the loop would pay for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from partita.observations.facts import NodeEvent, RunWindow
from partita.runtime.ort.evidence import parse_profile
from partita.runtime.ort.session import Session

OBSERVED_RUNS = {"prefill": 1, "decode": 4}
"""Session runs of each phase that are profiled at least."""


class Window:
    """The profiled runs of one session. `open` is True while profiling is on."""

    def __init__(self, session: Session, phases: Collection[str]) -> None:
        self.open = session.profiling
        self._session = session
        self._due = Counter({phase: OBSERVED_RUNS[phase] for phase in phases})
        self._runs: list[tuple[str, int]] = []
        self._rows: list[int | None] = []
        """Of each run, of the batch; None: all."""
        self._earlier = 0
        """Runs of generations before the last."""
        self.rehearses = False
        """Runs are of no generation now: they are in the profile, and count for nothing."""
        self._rehearsed = 0
        """Of the first runs, those."""
        self._profile: str | None = None

    def begin(self) -> None:
        """A generation begins: runs until now are of earlier ones."""
        self._earlier = len(self._runs)

    def after_run(self, phase: str, new_tokens: int, rows: int | None = None) -> None:
        """Count a run that was profiled, and close the window when every phase has had its runs. `rows`: of the batch,
        where it was not of all.
        """
        self._runs.append((phase, new_tokens))
        self._rows.append(rows)
        if self.rehearses:
            self._rehearsed = len(self._runs)
            return
        self._due[phase] -= 1
        if max(self._due.values()) <= 0:
            self.close()

    def cut_short(self, phase: str, new_tokens: int, rows: int | None = None) -> None:
        """Ctrl-C came during a run. Nobody knows whether the profile has it, so it is the last that is observed.

        Native code is not interrupted, so what the profile has is a whole run; one that had not begun is not in it.
        """
        if self.open:
            self._runs.append((phase, new_tokens))
            self._rows.append(rows)
        self.close()

    def close(self) -> None:
        """Stop profiling for good and keep the profile. May be called twice, and before the window is full."""
        if self.open:
            self.open = False
            self._profile = self._session.end_profiling()

    def events(self) -> tuple[tuple[NodeEvent, ...], tuple[RunWindow, ...]]:
        """Node executions and runs that were seen; closes the window.

        Of a phase that the last generation was seen in, its runs alone; of another, those of earlier generations.
        """
        self.close()
        if not self._profile:
            return (), ()
        events, runs = parse_profile(self._profile, self._runs)
        own = {run.phase for run in runs[self._earlier :]}
        told = tuple(
            replace(run, earlier=index < self._earlier, rows=self._rows[index])
            for index, run in enumerate(runs)
            if index >= self._rehearsed and (index >= self._earlier or run.phase not in own)
        )
        kept = {run.run for run in told}
        return tuple(event for event in events if event.run in kept), told
