"""Coverage of each source, and consistency checks that compare sources; docs/report-schema.md has their limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import RunFacts
from partita.observations.records import ChainEntry, Source
from partita.observations.text_format import name_some, plural
from partita.partition_reports.records import Check, Phase, SourceStatement

NO_DATA = "no data in this run"


def state_sources(facts: RunFacts, indexes: Sequence[SessionIndex]) -> tuple[SourceStatement, ...]:
    """One statement per source, available or not."""
    return tuple(
        SourceStatement(source=source, available=available, covers=covers if available else f"{NO_DATA}{reason}")
        for source, available, covers, reason in (*_graph_sources(facts, indexes), *_run_sources(facts, indexes))
    )


Coverage = tuple[Source, bool, str, str]
"""Source, whether it is available, what it covers, and a suffix with the reason if it is not available."""


def _graph_sources(facts: RunFacts, indexes: Sequence[SessionIndex]) -> Iterator[Coverage]:
    """Coverage of the graphs, over all files."""
    sessions = facts.sessions
    nodes = sum(len(session.graph) for session in sessions)
    yield "model_file", nodes > 0, plural(nodes, "node"), ""
    graphs = [index.optimised for index in indexes if index.optimised is not None]
    missing = "; ".join(dict.fromkeys(filter(None, (session.optimised_missing_reason for session in sessions))))
    covers = plural(sum(len(graph.nodes) for graph in graphs), "node") + (f"; {missing}" if missing else "")
    yield "optimised_model", bool(graphs), covers, f": {missing}" if missing else ""
    planned = [index for index in indexes if index.facts.plan is not None]
    yield "plan_file", bool(planned), plural(sum(len(index.order) for index in planned), "node"), ""
    listed = [len(session.assigned) for session in sessions if session.assigned is not None]
    yield "assignment", bool(listed), plural(sum(listed), "node"), ""


def _run_sources(facts: RunFacts, indexes: Sequence[SessionIndex]) -> Iterator[Coverage]:
    """Coverage of profile, log, probes, memory and clock, over all files."""
    events = sum(len(session.events) for session in facts.sessions)
    runs = sum(len(session.runs) for session in facts.sessions)
    yield "profile", bool(events), f"{plural(events, 'node execution')} in {plural(runs, 'session run')}", ""
    lines = sum(len(session.log) for session in facts.sessions)
    named = plural(sum(len(index.log) for index in indexes), "node")
    yield "native_log", bool(lines), f"{plural(lines, 'line')} of session creation, which name {named}", ""
    providers = [known for session in facts.sessions for known in session.providers.values()]
    probed = sum(len(known.probes) for known in providers)
    parts = sum(len(known.rejected.parts) for known in providers if known.rejected is not None)
    found = f"; {plural(parts, 'rejected part')} found by bisection" if parts else ""
    yield "probe", bool(probed or parts), f"probes of {plural(probed, 'node')}{found}", ": no probes"
    ports = sum(len(session.ports) for session in facts.sessions)
    yield "memory_info", bool(ports), f"graph inputs and outputs: {ports}", ""
    states = plural(len(facts.states), "state buffer")
    yield "binding", bool(facts.states), f"{states}, compared by address", ""
    yield "clock", bool(facts.steps), plural(len(facts.steps), "step"), ""
    resident = facts.memory.peak_rss_bytes is not None
    yield "process", resident, "resident memory before and after loading, and its peak", ""


SHOWN_NAMES = 3


def run_checks(
    indexes: Sequence[SessionIndex], phases: Sequence[Phase], chain: Sequence[ChainEntry]
) -> Iterator[Check]:
    """Every check that the available sources allow."""
    for index in indexes:
        yield from _check_session(index)
    for phase in phases:
        yield from check_phase(phase, chain)


def _check_session(index: SessionIndex) -> Iterator[Check]:
    """Checks of the plan and the executed nodes of one session."""
    facts = index.facts
    if facts.plan is None or not facts.events:
        return
    ran = frozenset(event.name for event in index.events)
    inside = f"; {len(index.subgraphs)} more ran in control-flow subgraphs" if index.subgraphs else ""
    good = f"{plural(len(ran), 'executed node')}, all in the plan{inside}"
    title, bad = "every executed node is in the plan", "executed, but not in the plan"
    yield _make("executed_in_plan", facts.file, title, sorted(ran - index.present), good, bad)
    idle = [name for name in index.order if name not in ran and name not in index.subgraphs]
    good = f"{plural(len(index.order), 'plan node')}, all executed"
    yield _make("plan_executed", facts.file, "every plan node was executed", idle, good, "not executed")


def check_phase(phase: Phase, chain: Sequence[ChainEntry]) -> Iterator[Check]:
    """Checks of the providers of one phase."""
    good = plural(len(phase.nodes), "node")
    unplaced = [node.name for node in phase.nodes if node.provider is None]
    title, bad = "every node has a provider", "without a known provider"
    yield _make("nodes_have_provider", phase.name, title, unplaced, good, bad)
    allowed = {entry.provider for entry in chain if entry.status == "active"}
    outside = [node.name for node in phase.nodes if node.provider and node.provider not in allowed]
    title, bad = "every node is on a provider of the chain", "outside the chain"
    yield _make("nodes_in_chain", phase.name, title, outside, good, bad)


def _make(key: str, part: str, title: str, offenders: Sequence[str], good: str, bad: str) -> Check:
    """A check of a phase or file that fails if there are offenders; the detail names the first few."""
    named = name_some([offender or "(no name)" for offender in offenders], SHOWN_NAMES)
    detail = f"{len(offenders)} {bad}: {named}" if offenders else good
    return Check(key=key, part=part, name=f"{part}: {title}", passed=not offenders, detail=detail)
