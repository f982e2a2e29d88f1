"""Observation of a session: its profiled runs, and its facts for a report.

The first runs of each phase are profiled. The profile is parsed only when facts are needed, not during a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from partita.observations.facts import GraphNode, NodeEvent, PortFact, ProviderFacts, RunWindow, SessionFacts
from partita.providers.resolve import Resolution
from partita.runtime.ort.native_log import parse_profile
from partita.runtime.ort.session import Session

OBSERVED_RUNS = {"prefill": 1, "decode": 4}
"""Minimum profiled session runs of each phase."""


class Window:
    """The profiled runs of one session. `open` is True while profiling is on."""

    def __init__(self, session: Session, phases: Collection[str]) -> None:
        self.open = session.profiling
        self._session = session
        self._due = Counter({phase: OBSERVED_RUNS[phase] for phase in phases})
        self._runs: list[tuple[str, int, int | None]] = []
        """Phase, new tokens and rows of the batch of each run; rows None: all."""
        self._earlier = 0
        """Runs of generations before the last."""
        self.rehearses = False
        """Runs belong to no generation: they are profiled but not counted."""
        self._rehearsed = 0
        """Number of uncounted runs; they come first."""
        self._profile: str | None = None

    def listening(self, phase: str) -> AbstractContextManager[None]:
        """Capture the log of a profiled run, the first of its phase."""
        return self._session.listening(phase) if self.open and not self.rehearses else nullcontext()

    def begin(self) -> None:
        """Begin a generation: earlier runs belong to earlier generations."""
        self._earlier = len(self._runs)

    def after_run(self, phase: str, new_tokens: int, rows: int | None = None) -> None:
        """Count a profiled run, and close the window when every phase has its runs. `rows`: None for all rows."""
        self._runs.append((phase, new_tokens, rows))
        if self.rehearses:
            self._rehearsed = len(self._runs)
            return
        self._due[phase] -= 1
        if max(self._due.values()) <= 0:
            self.close()

    def cut_short(self, phase: str, new_tokens: int, rows: int | None = None) -> None:
        """Close the window after Ctrl-C during a run; the profile contains the run completely or not at all."""
        if self.open:
            self._runs.append((phase, new_tokens, rows))
        self.close()

    def close(self) -> None:
        """Stop profiling and keep the profile. May be called repeatedly."""
        if self.open:
            self.open = False
            self._profile = self._session.end_profiling()

    def events(self) -> tuple[tuple[NodeEvent, ...], tuple[RunWindow, ...]]:
        """Profiled node executions and runs; closes the window.

        Each phase has the runs of the last generation, or of earlier ones if the last has none.
        """
        self.close()
        if not self._profile:
            return (), ()
        events, runs = parse_profile(self._profile, [run[:2] for run in self._runs])
        own = {run.phase for run in runs[self._earlier :]}
        counted = tuple(
            replace(run, earlier=index < self._earlier, rows=self._runs[index][2])
            for index, run in enumerate(runs)
            if index >= self._rehearsed and (index >= self._earlier or run.phase not in own)
        )
        numbers = {run.run for run in counted}
        return tuple(event for event in events if event.run in numbers), counted


def session_facts(
    session: Session,
    chain: Sequence[Resolution],
    *,
    graph: tuple[GraphNode, ...],
    inner: tuple[GraphNode, ...],
    file: str,
    phases: tuple[str, ...],
    ports: tuple[PortFact, ...] = (),
    events: tuple[NodeEvent, ...] = (),
    runs: tuple[RunWindow, ...] = (),
) -> SessionFacts:
    """Facts of one session. `graph`, `inner`: nodes of its model and of its subgraphs. `chain`: as the user gave it."""
    providers = {
        entry.provider.ort_name: ProviderFacts(
            patterns=entry.provider.node_patterns, budget=entry.budget, kernels=entry.provider.kernels
        )
        for entry in chain
    }
    return SessionFacts(
        file=file,
        phases=phases,
        graph=graph,
        subgraph_nodes=inner,
        plan=session.plan,
        plan_devices=session.plan_devices,
        assigned=session.assigned(),
        events=events,
        runs=runs,
        log=session.log,
        registered=session.registered,
        ports=ports,
        load_seconds=session.load_seconds,
        providers=providers,
        pins=session.pins,
        cpu=session.cpu,
        run_log=dict(session.run_log.lines),
    )
