"""Coverage of each source; docs/report-schema.md has their limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import ProviderFacts, RunFacts
from partita.observations.records import Source
from partita.observations.text_format import plural
from partita.partition_reports.records import SourceStatement


@dataclass(frozen=True, slots=True)
class Kind:
    """One source: availability and coverage."""

    source: Source
    available: Callable[[RunFacts], bool]
    coverage: Callable[[RunFacts, Sequence[SessionIndex]], str]
    missing: Callable[[RunFacts], str] = lambda facts: ""
    """Why it is unavailable; may be empty."""


def state_sources(facts: RunFacts, indexes: Sequence[SessionIndex]) -> tuple[SourceStatement, ...]:
    """One statement per source, available or not."""
    return tuple(
        SourceStatement(
            source=kind.source,
            available=kind.available(facts),
            covers=kind.coverage(facts, indexes) if kind.available(facts) else _nothing(kind.missing(facts)),
        )
        for kind in KINDS
    )


def _nothing(why: str) -> str:
    """Coverage text of an unavailable source."""
    return f"no data in this run: {why}" if why else "no data in this run"


def _cover_optimised(facts: RunFacts, indexes: Sequence[SessionIndex]) -> str:
    """Nodes of the optimised graph per file, or why a file has none."""
    parts = []
    for index in indexes:
        if index.optimised is None:
            parts.append(f"{index.facts.file}: no data: {index.facts.optimised_missing_reason or 'not requested'}")
            continue
        new = [name for name in index.optimised.nodes if name not in index.file_nodes and name not in index.memcpy]
        known = sum(bool(index.replaces(name)) for name in new)
        parts.append(
            f"{index.facts.file}: {plural(len(index.optimised.nodes), 'node')}, {len(index.memcpy)} of them Memcpy; "
            f"fused or inserted by ONNX Runtime: {len(new)}, of them fused from exported nodes: {known}"
        )
    return "; ".join(parts)


def _optimised_missing_reason(facts: RunFacts) -> str:
    """Why no session has an optimised graph."""
    return "; ".join(
        dict.fromkeys(
            session.optimised_missing_reason for session in facts.sessions if session.optimised_missing_reason
        )
    )


def _every_provider(facts: RunFacts) -> list[ProviderFacts]:
    """Facts about each provider in each session."""
    return [known for session in facts.sessions for known in session.providers.values()]


def _cover_probes(facts: RunFacts, indexes: Sequence[SessionIndex]) -> str:
    """Nodes and probes."""
    probes = [probe for known in _every_provider(facts) for probe in known.probes.values()]
    cut = sum(bool(probe.missing_probes) for probe in probes)
    parts = sum(len(known.rejected.parts) for known in _every_provider(facts) if known.rejected is not None)
    found = f"; {plural(parts, 'rejected part')} found by bisection" if parts else ""
    made = _count_experiments(facts)
    return f"{plural(made, 'probe')} of {plural(len(probes), 'node')}, incomplete for {cut} of them{found}"


def _count_experiments(facts: RunFacts) -> int:
    """Probes of this run and from the cache; equal nodes share theirs."""
    if facts.probing is not None:
        return facts.probing.experiments + facts.probing.cached
    return sum(map(len, {probe.variants for known in _every_provider(facts) for probe in known.probes.values()}))


def _cover_model_file(facts: RunFacts, indexes: Sequence[SessionIndex]) -> str:
    """Number of exported nodes that run under their own name.

    ONNX Runtime replaces an If with a constant condition by its branch, whose nodes are not in the main graph.
    """
    parts = []
    for index in indexes:
        same = sum(name in index.file_nodes for name in index.order)
        named = {name for node in index.order for name in index.replaces(node)}
        fused = named & index.file_nodes.keys()
        gone = index.file_nodes.keys() - fused - index.present
        inner = named - fused
        branches = f", which execute {plural(len(inner), 'node')} of control-flow subgraphs" if inner else ""
        parts.append(
            f"{index.facts.file}: {plural(len(index.facts.graph), 'node')} in the file; under their own name: {same}, "
            f"fused into another node: {len(fused)}, removed: {len(gone)}; added by ONNX Runtime: "
            f"{len(index.order) - same}{branches}"
        )
    return "; ".join(parts)


def _cover_plan(facts: RunFacts, indexes: Sequence[SessionIndex]) -> str:
    """Nodes and streams per plan."""
    return "; ".join(
        f"{index.facts.file}: {plural(len(index.order), 'node')} in {plural(len(index.facts.plan), 'stream')}"
        if index.facts.plan is not None
        else f"{index.facts.file}: no plan, nodes and order come from {index.order_source}"
        for index in indexes
    )


def _cover_assignment(facts: RunFacts, indexes: Sequence[SessionIndex]) -> str:
    """Entries of the assignment lists that are still in the plan."""
    listed = sum(len(session.assigned or ()) for session in facts.sessions)
    present = sum(name in index.listed_names for index in indexes for name in index.order)
    inside = sum(len(nodes) for index in indexes for nodes in index.compiled.values())
    where = f", {inside} in {sum(len(index.compiled) for index in indexes)} compiled subgraphs" if inside else ""
    return f"{plural(listed, 'node')} listed, {present} of them in the plan{where}"


def _cover_profile(facts: RunFacts, indexes: Sequence[SessionIndex]) -> str:
    """Events and runs."""
    events = sum(len(session.events) for session in facts.sessions)
    runs = sum(len(session.runs) for session in facts.sessions)
    return f"{plural(events, 'node execution')} in {plural(runs, 'session run')}"


def _cover_log(facts: RunFacts, indexes: Sequence[SessionIndex]) -> str:
    """Number of lines, and of the nodes that they name."""
    lines = sum(len(session.log) for session in facts.sessions)
    mentioned = sum(len(index.log) for index in indexes)
    return f"{plural(lines, 'line')} of session creation, which name {plural(mentioned, 'node')}"


def _cover_ports(facts: RunFacts, indexes: Sequence[SessionIndex]) -> str:
    """Graph inputs and outputs."""
    return f"graph inputs and outputs: {sum(len(session.ports) for session in facts.sessions)}"


def _cover_binding(facts: RunFacts, indexes: Sequence[SessionIndex]) -> str:
    """State buffers, and the number of observed steps."""
    counts = [state.checked_steps for state in facts.states if state.checked_steps is not None]
    steps = f" at {plural(min(counts), 'step')}" if len(counts) == len(facts.states) else ""
    return f"{plural(len(facts.states), 'state buffer')}, compared by address{steps}"


KINDS = (
    Kind("model_file", lambda facts: any(session.graph for session in facts.sessions), _cover_model_file),
    Kind(
        "optimised_model",
        lambda facts: any(session.optimised is not None for session in facts.sessions),
        _cover_optimised,
        _optimised_missing_reason,
    ),
    Kind("plan_file", lambda facts: any(session.plan is not None for session in facts.sessions), _cover_plan),
    Kind(
        "assignment", lambda facts: any(session.assigned is not None for session in facts.sessions), _cover_assignment
    ),
    Kind("profile", lambda facts: any(session.events for session in facts.sessions), _cover_profile),
    Kind("native_log", lambda facts: any(session.log for session in facts.sessions), _cover_log),
    Kind(
        "probe",
        lambda facts: any(known.probes or known.rejected for known in _every_provider(facts)),
        _cover_probes,
        lambda facts: "no probes",
    ),
    Kind("memory_info", lambda facts: any(session.ports for session in facts.sessions), _cover_ports),
    Kind("binding", lambda facts: bool(facts.states), _cover_binding),
    Kind("clock", lambda facts: bool(facts.steps), lambda facts, indexes: plural(len(facts.steps), "step")),
    Kind(
        "process",
        lambda facts: facts.memory.peak_rss_bytes is not None,
        lambda facts, indexes: "resident memory before and after loading, and its peak",
    ),
)
