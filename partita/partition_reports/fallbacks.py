"""Nodes that are not on the first provider of the chain, each with the reason that has the strongest evidence."""

from __future__ import annotations

from partita.partition_reports.groups import provider_of
from partita.partition_reports.reasons.base import Context, explain
from partita.partition_reports.records import ChainEntry, Fallback, NodePlacement
from partita.partition_reports.session_index import PhaseName, SessionIndex


def find_fallbacks(
    index: SessionIndex, phase: PhaseName, nodes: tuple[NodePlacement, ...], chain: tuple[ChainEntry, ...]
) -> tuple[Fallback, ...]:
    """Nodes off the first provider of `chain`, in execution order. A node whose provider is unknown counts."""
    if not chain:
        return ()
    return tuple(fall_back(index, phase, node, chain[0]) for node in nodes if node.provider != chain[0].provider)


def fall_back(index: SessionIndex, phase: PhaseName, node: NodePlacement, wanted: ChainEntry) -> Fallback:
    """Explain one node."""
    names = (node.name, *node.replaces)
    context = Context(
        node=node.name,
        op_type=node.op_type,
        provider=provider_of(node),
        wanted=wanted,
        exported=node.name in index.exported,
        replaces=node.replaces,
        log=tuple(line for name in names for line in index.log.get(name, ())),
    )
    reason, finding = explain(context)
    origins = (index.exported[name].source for name in names if name in index.exported)
    return Fallback(
        phase=phase,
        node=node.name,
        op_type=node.op_type,
        wanted=wanted.provider,
        provider=provider_of(node),
        reason=reason.code,
        evidence_kind=finding.kind,
        evidence=finding.evidence,
        remedy=finding.remedy or reason.remedy,
        module=node.module,
        source_line=next((origin for origin in origins if origin), None),
    )
