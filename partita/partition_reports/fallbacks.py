"""Nodes that are not on the first provider of the chain, each with the reason that has the strongest evidence."""

from __future__ import annotations

from partita.partition_reports.groups import provider_of
from partita.partition_reports.reasons.base import Context, explain
from partita.partition_reports.records import ChainEntry, Fallback, NodePlacement, PhaseName
from partita.partition_reports.session_index import SessionIndex


def find_fallbacks(
    index: SessionIndex, phase: PhaseName, nodes: tuple[NodePlacement, ...], chain: tuple[ChainEntry, ...]
) -> tuple[Fallback, ...]:
    """Nodes off the first provider of `chain`, in execution order. A node whose provider is unknown counts."""
    if not chain:
        return ()
    wanted = chain[0]
    return tuple(
        explain_node(index, phase, node.name, node.op_type, provider_of(node), wanted)
        for node in nodes
        if node.provider != wanted.provider
    )


def explain_node(
    index: SessionIndex, phase: PhaseName, name: str, op_type: str | None, provider: str, wanted: ChainEntry
) -> Fallback:
    """Why the node `name` is on `provider` and not on the wanted one."""
    replaces = index.replaces(name)
    names = (name, *replaces)
    context = Context(
        node=name,
        op_type=op_type,
        provider=provider,
        wanted=wanted,
        exported=name in index.exported,
        replaces=replaces,
        log=tuple(line for each in names for line in index.log.get(each, ())),
        patterns=index.facts.patterns,
        session_log=index.graph_log,
        pin=next((index.facts.pins[each] for each in names if each in index.facts.pins), None),
    )
    reason, finding = explain(context)
    origins = (index.exported[each].source for each in names if each in index.exported)
    return Fallback(
        phase=phase,
        node=name,
        op_type=op_type,
        wanted=wanted.provider,
        provider=provider,
        reason=reason.code,
        evidence_kind=finding.kind,
        evidence=finding.evidence,
        remedy=finding.remedy or reason.remedy,
        module=index.module(name),
        source_line=next((origin for origin in origins if origin), None),
    )
