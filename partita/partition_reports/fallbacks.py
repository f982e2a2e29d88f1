"""Nodes that are not on the first provider of the chain, each with the reason that has the strongest evidence."""

from __future__ import annotations

from partita.partition_reports.facts import Trial
from partita.partition_reports.groups import UNKNOWN, provider_of
from partita.partition_reports.placement import choose_provider
from partita.partition_reports.probes import fullest
from partita.partition_reports.reasons.base import Context, explain
from partita.partition_reports.records import ChainEntry, Fallback, NodePlacement, PhaseName
from partita.partition_reports.records import Trial as TrialRecord
from partita.partition_reports.session_index import SessionIndex

UNDECIDED = frozenset({"no_kernel_op", "subgraph_rejected", "not_claimed", "unexplained"})
"""Reasons that an experiment may replace by a better one: what is logged of them does not tell type from operator."""


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
        probe=fullest(index.facts.probes, names),
        rejected=index.facts.rejected,
        budget=index.facts.budget,
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
        trials=tuple(trial_record(trial) for trial in context.probe.trials) if context.probe else (),
        unprobed=context.probe.unprobed if context.probe else "",
    )


def trial_record(trial: Trial) -> TrialRecord:
    """One experiment as a report has it."""
    return TrialRecord(
        factor=trial.factor, change=trial.change, outcome=trial.outcome, said=trial.said, cached=trial.cached
    )


def nodes_to_probe(index: SessionIndex, wanted: ChainEntry) -> tuple[str, ...]:
    """Nodes of the file, in execution order, that are off the wanted provider for a reason that only experiments tell.

    A fused node stands for the nodes that it replaces.
    """
    found: list[str] = []
    for name in index.order:
        provider = choose_provider(index.claims[name])
        if provider != wanted.provider:
            told = explain_node(index, "run", name, index.op_type(name), provider or UNKNOWN, wanted)
            if told.reason in UNDECIDED:
                found += [each for each in (name, *index.replaces(name)) if each in index.exported]
    return tuple(dict.fromkeys(found))
