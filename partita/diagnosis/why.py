"""Nodes that are not on the first provider of the chain, each with the reason that has the strongest evidence."""

from __future__ import annotations

from partita.diagnosis.evidence import Context, Finding
from partita.diagnosis.precedence import explain
from partita.diagnosis.probe_verdict import fullest
from partita.diagnosis.reasons.base import Reason, load_reasons
from partita.diagnosis.records import Fallback
from partita.diagnosis.records import Trial as TrialRecord
from partita.diagnosis.session_index import SessionIndex, choose_provider
from partita.observations.facts import AssignedNode, Trial
from partita.observations.names import INLINED, UNKNOWN
from partita.observations.records import ChainEntry, PhaseName

UNDECIDED = frozenset({"no_kernel_op", "subgraph_rejected", "not_claimed", "unexplained"})
"""Reasons that an experiment may replace by a better one: what is logged of them does not tell type from operator."""


def find_fallbacks(index: SessionIndex, phase: PhaseName, chain: tuple[ChainEntry, ...]) -> tuple[Fallback, ...]:
    """Nodes off the first provider of `chain`, in execution order. A node whose provider is unknown counts."""
    if not chain:
        return ()
    wanted = chain[0]
    main = ((name, index.op_type(name), choose_provider(index.claims[name]) or UNKNOWN) for name in index.order)
    inner = ((node.name, node.op_type, node.provider) for node in strays_in_bodies(index, wanted.provider))
    return tuple(
        explain_node(index, phase, name, op_type, provider, wanted)
        for name, op_type, provider in (*main, *inner)
        if provider != wanted.provider
    )


def strays_in_bodies(index: SessionIndex, wanted: str) -> tuple[AssignedNode, ...]:
    """Nodes in bodies of control flow that are on another provider than the wanted one.

    They are in no plan and run no telling how often, so they have no place in a phase's figures.
    """
    listed = {
        node.name: node
        for node in index.facts.assigned or ()
        if node.name in index.inner and node.name not in index.present and node.provider != wanted
    }
    return tuple(listed.values())


def explain_node(
    index: SessionIndex, phase: PhaseName, name: str, op_type: str | None, provider: str, wanted: ChainEntry
) -> Fallback:
    """Why the node `name` is on `provider` and not on the wanted one."""
    origin = (name, *index.replaces(name))
    names = (name,) if name in index.parts else origin  # what is said of a function is not said of its nodes
    context = Context(
        node=name,
        op_type=op_type,
        provider=provider,
        skipped=wanted,
        exported=name in index.exported or name in index.inner,
        replaces=names[1:],
        log=(*index.blank_log.get(name, ()), *(line for each in names for line in index.log.get(each, ()))),
        patterns=index.facts.patterns,
        session_log=index.graph_log,
        pin=next((index.facts.pins[each] for each in origin if each in index.facts.pins), None),
        probe=fullest(index.facts.probes, names),
        rejected=index.facts.rejected,
        budget=index.facts.budget,
        nameless=name in index.parts,
        beside=index.beside.get(name, ()),
    )
    lost = provider == UNKNOWN and wanted.status == "active" and context.pin is None
    reason, finding = nowhere() if lost else explain(context)
    known = (index.exported.get(each) or index.inner.get(each) for each in origin)
    origins = (node.source for node in known if node is not None)
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


def nowhere() -> tuple[Reason, Finding]:
    """For a node that no source places: it may well be on the wanted provider, so nothing is said of why it is not."""
    unexplained = next(reason for reason in load_reasons() if reason.code == "unexplained")
    return unexplained, Finding("none", "nothing", "no source says where this node runs")


def trial_record(trial: Trial) -> TrialRecord:
    """One experiment as a report has it."""
    return TrialRecord(
        factor=trial.factor, change=trial.change, outcome=trial.outcome, said=trial.said, cached=trial.cached
    )


def nodes_to_probe(index: SessionIndex, wanted: ChainEntry) -> tuple[str, ...]:
    """Nodes of the file, in execution order, that are off the wanted provider for a reason that only experiments tell.

    A fused node stands for the nodes that it replaces, a node without a name for itself.
    """
    placed = [
        (name, choose_provider(index.claims[name]), (name,) if name in index.parts else (name, *index.replaces(name)))
        for name in index.order
    ]
    placed += [(node.name, node.provider, (node.name,)) for node in strays_in_bodies(index, wanted.provider)]
    found: list[str] = []
    for name, provider, names in placed:
        if provider is not None and provider != wanted.provider:
            told = explain_node(index, "run", name, index.op_type(name), provider, wanted)
            if told.reason in UNDECIDED:
                found += [each for each in names if can_be_tried(index, each)]
    return tuple(dict.fromkeys(found))


def can_be_tried(index: SessionIndex, name: str) -> bool:
    """Whether the file has the node, or a function that ONNX Runtime has the node from."""
    return name in index.exported or name in index.inner or name in index.parts or name.startswith(INLINED)
