"""Anchors of rows and groups of a report, and keys of similar findings, shared by all sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from partita.diagnosis.records import Fallback, SkippedProvider
from partita.observations.codes import PROVIDER_CODES
from partita.partition_reports.records import Report
from partita.partition_reports.verdict import merge_phases


def node_anchors(report: Report) -> dict[tuple[str, int], str]:
    """(phase, position) -> anchor in the list of nodes; phases with equal placement share rows."""
    groups = node_groups(report)
    return {
        (phase.name, node.position): f"{groups[phase.name]}{node.position}"
        for phase in report.phases
        for node in phase.nodes
    }


def node_groups(report: Report) -> dict[str, str]:
    """Phase -> prefix of its row anchors, to be followed by the node's position."""
    merged = enumerate(merge_phases(report.phases))
    return {phase.name: f"n{number}-" for number, phases in merged for phase in phases}


def fallback_anchors(report: Report) -> dict[tuple[str, str, str], str]:
    """(phase, node, provider) -> anchor of its fallback, for nodes with a fallback.

    The provider distinguishes nodes in control-flow subgraphs from plan nodes of the same name. Phases with equal
    findings share an anchor.
    """
    known = finding_key(report)
    keys = {
        (entry.phase, entry.node, entry.provider): (entry.provider, entry.node, known(entry))
        for entry in report.fallbacks
    }
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
    return {place: f"w{numbers[key]}" for place, key in keys.items()}


def reason_anchor(number: int) -> str:
    """Anchor of a reason's group, by its number in display order."""
    return f"r{number}"


OPERATOR_EVIDENCE = ("logged", "probed")
"""Kinds of evidence that apply to the operator of a node."""


def finding_key(report: Report) -> Callable[[Fallback], object]:
    """A function that returns the finding of a node for every preferred provider, for grouping."""
    parts = {name: number for number, part in enumerate(report.rejected_parts) for name in part.nodes}

    def key(entry: Fallback) -> object:
        part = parts.get(entry.node)
        about_operator = part is None and any(map(_is_about_operator, entry.preferred))
        return tuple(map(_known, entry.preferred)), part, entry.op_type if about_operator else None

    return key


def _known(why: SkippedProvider) -> object:
    """The finding for one provider, without the texts that Partita writes."""
    trials = tuple((trial.factor, trial.after, trial.outcome, trial.neg_added) for trial in why.variants)
    return why.provider, why.reason, why.evidence_kind, trials, bool(why.missing_probes)


def _is_about_operator(why: SkippedProvider) -> bool:
    return why.evidence_kind in OPERATOR_EVIDENCE and why.reason not in PROVIDER_CODES


def first_of(texts: Iterable[str]) -> str:
    """The first of several texts, with the number of different texts if there are several."""
    different = list(dict.fromkeys(texts))
    return different[0] + (f" (one of {len(different)})" if len(different) > 1 else "")
