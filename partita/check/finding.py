"""Requirements held against a report: the figure of each measure, and the nodes that are in the way. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from partita.check.compared import COMPARED, Beside
from partita.check.measures import MEASURES, Found
from partita.check.requirements import (
    COUNTED,
    LOST,
    MEASURED,
    STATED,
    Measure,
    Requirement,
    Selector,
)
from partita.errors import UsageError
from partita.observations.text_format import decimals, listing, name_some, plural, short_provider
from partita.partition_reports.groups import total_us
from partita.partition_reports.node_keys import stands_for
from partita.partition_reports.outcome import is_known
from partita.partition_reports.records import NodePlacement, Phase, Report
from partita.spelling import spelled

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


INSIDE = -1
"""The position of a node in a body, which is in no plan."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether one measure holds, and what was found."""

    holds: bool
    figure: str
    more: str = ""
    """The nodes because of which it does not hold."""


def find(requirement: Requirement, report: Report, beside: Beside | None = None) -> list[tuple[bool, str]]:
    """Whether each measure holds, and the figures; phases with the same outcome share a sentence.

    `beside`: the report beside its baseline, which measures of `LOST` need. Without a phase that is meant there is one
    sentence, and it does not hold. Empty when there is nothing to be said of a baseline.
    """
    whole = [measure for measure in requirement.measures if measure.field in STATED or measure.field in LOST]
    found = [told for measure in whole if (told := _weigh_whole(measure, report, beside)) is not None]
    parts = [measure for measure in requirement.measures if measure not in whole]
    return [*found, *(_find_in_phases(requirement, parts, report) if parts else ())]


def _weigh_whole(measure: Measure, report: Report, beside: Beside | None) -> tuple[bool, str] | None:
    """One measure of the whole report; None when it does not apply. Raises UsageError for the want of a baseline."""
    if measure.field in STATED:
        found: Found | None = MEASURES[measure.field](report)
    elif beside is None:
        raise UsageError(f"{measure.field} needs {spelled('baseline')}: {LOST[measure.field]}")
    else:
        found = COMPARED[measure.field](beside)
    return None if found is None else _decide(found, measure)


def _decide(found: Found, measure: Measure) -> tuple[bool, str]:
    """Whether it holds for all that the figure may be, and what is said."""
    holds = COMPARE[measure.sign]
    if found.value is None or not holds(found.value, measure.value):
        return False, found.broken or found.held
    if found.most is not None and not holds(found.most, measure.value):
        return False, found.unsure
    return True, found.held


def _find_in_phases(requirement: Requirement, measures: Sequence[Measure], report: Report) -> list[tuple[bool, str]]:
    """The same for measures of selected nodes, and of phases."""
    phases = [phase for phase in report.phases if is_known(phase) and _about(phase, requirement.selectors)]
    if not phases:
        return [(False, "the report has no such phase with a node in it")]
    alike: dict[Finding, list[str]] = {}
    for measure in measures:
        for phase in phases:
            alike.setdefault(_weigh(requirement, measure, phase, report), []).append(phase.name)
    return [(found.holds, f"{found.figure} in {listing(names)}{found.more}") for found, names in alike.items()]


def _about(phase: Phase, selectors: Iterable[Selector]) -> bool:
    """The phase is meant."""
    return all((phase.name == entry.value) == entry.equal for entry in selectors if entry.field == "phase")


def _weigh(requirement: Requirement, measure: Measure, phase: Phase, report: Report) -> Finding:
    """One measure in one phase."""
    chosen = Chosen.of(requirement, phase, report)
    value = chosen.measure(measure.field) if measure.field in COUNTED else _measure_phase(measure.field, phase)
    if value is None and phase.folded is not None and measure.field in COUNTED:
        return Finding(True, f"{measure.field} not asked: ONNX Runtime folded the whole graph at load time")
    if value is None:
        return Finding(False, f"{measure.field} cannot be confirmed", f": {chosen.why_unknown(measure)}")
    holds = COMPARE[measure.sign](value, measure.value)
    shown = f"{value:,.0f}" if value == int(value) and not measure.field.endswith("share") else _say(measure, value)
    left_out = phase.bodies.nodes - len(_parts(phase)) if phase.bodies and measure.field in COUNTED else 0
    bodies = f"; {plural(left_out, 'node')} in control-flow subgraphs not counted" if left_out else ""
    return Finding(holds, f"{measure.field} {shown}", bodies + ("" if holds else chosen.blame(measure)))


def _say(measure: Measure, value: float) -> str:
    """A share with four decimals, so that it can be told from its limit; other numbers with three digits."""
    return f"{value:.4g}" if measure.field.endswith("share") else decimals(value)


def _measure_phase(field: str, phase: Phase) -> float | None:
    """A figure of a whole phase."""
    if field == "copies" and phase.bodies is not None:
        inside = phase.bodies.copies
        return None if inside is None else len(phase.copies) + inside
    figures: dict[str, float | None] = {
        "partitions": len(phase.partitions),
        "copies": len(phase.copies),
        "copy_bytes_per_token": phase.cost.copy_bytes_per_token if phase.cost else None,
        "tokens_per_second": phase.tokens_per_second,
        "p50_ms": phase.step_p50_ms,
    }
    return figures[field]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The nodes that a requirement is about, in one phase."""

    base: tuple[NodePlacement, ...]
    """Those of the operator and module."""
    nodes: tuple[NodePlacement, ...]
    """Those of them on the provider, and with the reason."""
    reasons: Mapping[str, tuple[str, ...]]
    """Of each node, for every provider that was preferred and skipped."""

    @classmethod
    def of(cls, requirement: Requirement, phase: Phase, report: Report) -> Chosen:
        """The nodes of a phase that the selectors of a requirement choose."""
        reasons = {entry.node: entry.codes for entry in report.fallbacks if entry.phase == phase.name}
        kinds = [entry for entry in requirement.selectors if entry.field in ("op", "module")]
        places = [entry for entry in requirement.selectors if entry.field in ("provider", "reason")]
        there = (*phase.nodes, *_parts(phase))
        base = tuple(node for node in there if all(_fits(node, entry, reasons) for entry in kinds))
        return cls(base, tuple(node for node in base if all(_fits(node, entry, reasons) for entry in places)), reasons)

    def measure(self, field: str) -> float | None:
        """A figure of the chosen nodes; None when it is not known, or there is nothing to take a part of."""
        if field == "nodes":
            return len(self.nodes)
        if field == "share":
            whole = _weight(self.base)
            return _weight(self.nodes) / whole if whole else None
        # The time of what is in a body is that of the node that has the body.
        base, nodes = ([each for each in some if each.position != INSIDE] for some in (self.base, self.nodes))
        whole_us, part_us = total_us(base), total_us(nodes) if nodes else 0.0
        return part_us / whole_us if whole_us and part_us is not None else None

    def why_unknown(self, measure: Measure) -> str:
        """Why a figure is not there."""
        if measure.field in MEASURED:
            return "the report does not have it"
        return "no time is known" if _weight(self.base) else "no node of the file is selected"

    def blame(self, measure: Measure) -> str:
        """The nodes because of which it does not hold: those that are missing, or those that are too many."""
        if measure.field not in COUNTED:
            return ""
        missing = measure.sign in (">", ">=")
        ids = {id(node) for node in self.nodes}
        named = [node for node in self.base if id(node) not in ids] if missing else list(self.nodes)
        if not self.nodes:
            return ": no node is selected" if missing else ""
        return f"{', without' if missing else ':'} {name_some([self.describe(node) for node in named])}"

    def describe(self, node: NodePlacement) -> str:
        """A node, where it is, and why."""
        where = short_provider(node.provider) if node.provider else "an unknown provider"
        why = f": {', '.join(dict.fromkeys(self.reasons[node.name]))}" if node.name in self.reasons else ""
        return f"{node.name} ({node.op_type or 'unknown'} on {where}{why})"


def _parts(phase: Phase) -> tuple[NodePlacement, ...]:
    """Nodes in bodies of functions that ONNX Runtime unfolded: parts of nodes of the file like those of the plan."""
    return tuple(
        NodePlacement(
            position=INSIDE,
            name=part.name,
            op_type=part.op_type,
            provider=part.provider,
            module=part.module,
            layer=None,
            host_us_per_run=None,
            output_bytes=None,
            replaces=part.replaces,
            replaces_op_types=part.replaces_op_types,
            sources=("assignment",),
        )
        for part in (phase.bodies.parts if phase.bodies else ())
    )


def _weight(nodes: Iterable[NodePlacement]) -> int:
    """Nodes of the file behind these."""
    return sum(len(stands_for(node)) for node in nodes if node.replaces or "model_file" in node.sources)


def _fits(node: NodePlacement, selector: Selector, reasons: Mapping[str, tuple[str, ...]]) -> bool:
    """The node is meant. What is not known is neither equal nor unequal to anything."""
    if selector.field == "reason":
        return (selector.value in reasons.get(node.name, ())) == selector.equal
    if selector.field == "op" and selector.value in node.replaces_op_types:
        return selector.equal
    value = {
        "op": node.op_type,
        "module": node.module,
        "provider": node.provider,
    }[selector.field]
    if value is None:
        return False
    same = f".{selector.value}." in f".{value}." if selector.field == "module" else value == selector.value
    return same == selector.equal
