"""What a session knows of itself, as facts: the one place where they are put together, whatever was run in it."""

from __future__ import annotations

from collections.abc import Sequence

from partita.observations.facts import GraphNode, NodeEvent, PortFact, ProviderFacts, RunWindow, SessionFacts
from partita.providers.resolve import Resolution
from partita.runtime.ort.session import Session


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
    """Facts of one session. `graph`, `inner`: nodes of its model, and of bodies in it. `chain`: as the user gave it."""
    return SessionFacts(
        file=file,
        phases=phases,
        graph=graph,
        inner=inner,
        plan=session.plan,
        plan_devices=session.plan_devices,
        assigned=session.assigned(),
        events=events,
        runs=runs,
        log=session.log,
        registered=session.registered,
        ports=ports,
        load_seconds=session.load_seconds,
        providers={
            entry.provider.ort_name: ProviderFacts(patterns=entry.provider.node_patterns, budget=entry.budget)
            for entry in chain
        },
        pins=session.pins,
        cpu=session.cpu,
    )
