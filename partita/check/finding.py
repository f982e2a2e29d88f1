"""Evaluation of requirements on a report: the value of each measure, and the nodes that violate it. Pure."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from partita.check.compared import COMPARED, Beside
from partita.check.measures import MEASURES, NOT_ALL_SEEN, Found
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
from partita.observations.names import UNKNOWN
from partita.observations.text_format import decimals, listing, name_some, plural, short_provider
from partita.partition_reports.copies import copies_inside
from partita.partition_reports.groups import provider_of, total_us
from partita.partition_reports.node_keys import INSIDE, Part, inlined_parts, is_added, parts_of
from partita.partition_reports.outcome import failure_of, is_known
from partita.partition_reports.records import NodePlacement, Phase, Report

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether one measure holds, with its value."""

    holds: bool
    figure: str
    more: str = ""
    """The nodes that violate it."""


def find(requirement: Requirement, report: Report, beside: Beside | None = None) -> list[tuple[bool, str]]:
    """Whether each measure holds, with a text; phases with the same outcome share a text.

    Measures of `LOST` need the comparison with a baseline. Without a matching phase there is one result, which does not
    hold.
    """
    if failure_of(report) is not None:
        return [(False, "cannot be confirmed: the run failed")]
    whole = [measure for measure in requirement.measures if measure.field in STATED or measure.field in LOST]
    found = [_weigh_whole(measure, report, beside) for measure in whole]
    parts = [measure for measure in requirement.measures if measure not in whole]
    return [*found, *(_find_in_phases(requirement, parts, report) if parts else ())]


def _weigh_whole(measure: Measure, report: Report, beside: Beside | None) -> tuple[bool, str]:
    """One measure of the whole report. Raises UsageError if it needs a baseline and there is none."""
    if measure.field in STATED:
        return _decide(MEASURES[measure.field](report), measure)
    if beside is None:
        raise UsageError(f"{measure.field} needs `baseline`: {LOST[measure.field]}")
    return _decide(COMPARED[measure.field](beside), measure)


def _decide(found: Found, measure: Measure) -> tuple[bool, str]:
    """Whether the measure holds for every possible value of `found`, with the text."""
    holds = COMPARE[measure.sign]
    if found.value is None or not holds(found.value, measure.value):
        return False, found.broken or found.held
    if found.most is not None and not holds(found.most, measure.value):
        return False, found.unsure
    return True, found.held


def _find_in_phases(requirement: Requirement, measures: Sequence[Measure], report: Report) -> list[tuple[bool, str]]:
    """As `find`, for measures of selected nodes and of phases."""
    phases = [phase for phase in report.phases if is_known(phase) and _about(phase, requirement.selectors)]
    if not phases:
        return [(False, "the report has no selected phase with nodes")]
    alike: dict[Finding, list[str]] = {}
    for measure in measures:
        for phase in phases:
            alike.setdefault(_weigh(requirement, measure, phase, report), []).append(phase.name)
    return [(found.holds, f"{found.figure} in {listing(names)}{found.more}") for found, names in alike.items()]


def _about(phase: Phase, selectors: Iterable[Selector]) -> bool:
    """Whether the selectors include the phase."""
    return all((phase.name == entry.value) == entry.equal for entry in selectors if entry.field == "phase")


def _weigh(requirement: Requirement, measure: Measure, phase: Phase, report: Report) -> Finding:
    """One measure in one phase."""
    chosen = Chosen.of(requirement, phase, report)
    value = chosen.measure(measure.field) if measure.field in COUNTED else _measure_phase(measure.field, phase)
    if value is None and phase.folded is not None and measure.field in COUNTED:
        return Finding(True, f"{measure.field} does not apply: ONNX Runtime folded the whole graph at load time")
    if value is None:
        return Finding(False, f"{measure.field} cannot be confirmed", f": {chosen.why_unknown(measure, phase)}")
    holds = COMPARE[measure.sign](value, measure.value)
    shown = f"{value:,.0f}" if value == int(value) and not measure.field.endswith("share") else _say(measure, value)
    left_out = phase.bodies.nodes - len(inlined_parts(phase)) if phase.bodies and measure.field in COUNTED else 0
    bodies = f"; {plural(left_out, 'node')} in control-flow subgraphs not counted" if left_out else ""
    return Finding(holds, f"{measure.field} {shown}", bodies + ("" if holds else chosen.blame(measure)))


def _say(measure: Measure, value: float) -> str:
    """A share with four decimals, to distinguish it from its limit; other numbers with three digits."""
    return f"{value:.4g}" if measure.field.endswith("share") else decimals(value)


def _measure_phase(field: str, phase: Phase) -> float | None:
    """A figure of a whole phase; None if unknown, as the size of copies in control-flow subgraphs."""
    inside = copies_inside(phase)
    figures: dict[str, float | None] = {
        "partitions": len(phase.partitions),
        "copies": None if inside is None else len(phase.copies) + inside,
        "copy_bytes_per_token": phase.cost.copy_bytes_per_token if phase.cost and inside == 0 else None,
        "tokens_per_second": phase.tokens_per_second,
        "p50_ms": phase.step_p50_ms,
    }
    return figures[field]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The nodes that a requirement selects in one phase."""

    base: tuple[NodePlacement, ...]
    """Nodes of the operator and module."""
    nodes: tuple[NodePlacement, ...]
    """Nodes of `base` on the provider and with the reason."""
    reasons: Mapping[tuple[str, str], tuple[str, ...]]
    """(node, its provider) -> reasons for every skipped preferred provider."""
    weights: Mapping[int, int]
    """id of a node of `base` -> number of its file nodes of the operator and module."""
    doubtful: tuple[NodePlacement, ...]
    """Fused nodes for which the report does not show whether all parts are of the operator and module."""
    perhaps: tuple[NodePlacement, ...]
    """Nodes of `doubtful` that match provider and reason, but may not be in `base`."""
    nowhere: bool = False
    """No phase has a node of the module of a share: it was renamed, folded or never existed."""

    @classmethod
    def of(cls, requirement: Requirement, phase: Phase, report: Report) -> Chosen:
        """The nodes of a phase that a requirement selects."""
        reasons = {(e.node, e.provider): e.codes for e in report.fallbacks if e.phase == phase.name}
        kinds = [entry for entry in requirement.selectors if entry.field in ("op", "module")]
        places = [entry for entry in requirement.selectors if entry.field in ("provider", "reason")]
        there = (*phase.nodes, *inlined_parts(phase))
        meant = {id(node): _count_meant(node, kinds) for node in there}
        base = tuple(node for node in there if meant[id(node)][True])
        doubtful = tuple(node for node in there if meant[id(node)][None])
        return cls(
            base=base,
            nodes=tuple(node for node in base if all(_fits(node, entry, reasons) for entry in places)),
            reasons=reasons,
            weights={id(node): meant[id(node)][True] for node in base},
            doubtful=doubtful,
            perhaps=tuple(
                node
                for node in doubtful
                if not meant[id(node)][True] and all(_fits(node, entry, reasons) for entry in places)
            ),
            nowhere=bool(places) and _is_nowhere([entry for entry in kinds if entry.field == "module"], report),
        )

    def measure(self, field: str) -> float | None:
        """A figure of the selected nodes; None if it is unknown or `base` is empty."""
        if field == "nodes":
            return None if self.perhaps or self.nowhere else len(self.nodes)
        if self.doubtful:
            return None
        if field == "share":
            whole = self.weigh(self.base)
            return self.weigh(self.nodes) / whole if whole else None
        # The time of a control-flow subgraph is that of its node.
        base, nodes = ([each for each in some if each.position != INSIDE] for some in (self.base, self.nodes))
        whole_us, part_us = total_us(base), total_us(nodes) if nodes else 0.0
        return part_us / whole_us if whole_us and part_us is not None else None

    def weigh(self, nodes: Iterable[NodePlacement]) -> int:
        """Number of file nodes of some nodes of `base`."""
        return sum(self.weights[id(node)] for node in nodes if not is_added(node))

    def why_unknown(self, measure: Measure, phase: Phase) -> str:
        """Why a figure is unknown."""
        if measure.field == "copies":
            return NOT_ALL_SEEN
        if measure.field == "copy_bytes_per_token" and copies_inside(phase) != 0:
            return "the size of copies in control-flow subgraphs is unknown"
        if measure.field in MEASURED:
            return "the report does not have it"
        if self.nowhere:
            return "no phase has a node of this module"
        if self.doubtful:
            names = name_some([node.name for node in self.perhaps or self.doubtful])
            return f"the report lacks operators and modules of parts of {names}"
        return "the time is unknown" if self.weigh(self.base) else "no node of the file is selected"

    def blame(self, measure: Measure) -> str:
        """The nodes that violate the measure: missing nodes, or excess nodes."""
        if measure.field not in COUNTED:
            return ""
        missing = measure.sign in (">", ">=")
        ids = {id(node) for node in self.nodes}
        named = [node for node in self.base if id(node) not in ids] if missing else list(self.nodes)
        if not self.nodes:
            return ": no node is selected" if missing else ""
        return f"{', without' if missing else ':'} {name_some([self.describe(node) for node in named])}"

    def describe(self, node: NodePlacement) -> str:
        """A node with provider and reasons."""
        where = short_provider(node.provider) if node.provider else "an unknown provider"
        codes = self.reasons.get((node.name, provider_of(node)))
        why = f": {', '.join(dict.fromkeys(codes))}" if codes is not None else ""
        return f"{node.name} ({node.op_type or 'unknown'} on {where}{why})"


def _is_nowhere(modules: Sequence[Selector], report: Report) -> bool:
    """Whether modules are selected and no node of any phase is, or may be, of these modules."""
    there = (node for phase in report.phases for node in (*phase.nodes, *inlined_parts(phase)))
    counts = (_count_meant(node, modules) for node in there)
    return any(entry.equal for entry in modules) and not any(count[True] or count[None] for count in counts)


def _count_meant(node: NodePlacement, selectors: Sequence[Selector]) -> Counter[bool | None]:
    """Number of file nodes in a node that match operator and module: True, False, or None for unknown."""
    parts = parts_of(node)
    found: Counter[bool | None] = Counter()
    for part in parts:
        answers = [_is_meant(node, part, parts, selector) for selector in selectors]
        found[False if False in answers else None if None in answers else True] += 1
    return found


def _is_meant(node: NodePlacement, part: Part, parts: Sequence[Part], selector: Selector) -> bool | None:
    """Whether a file node matches a selector; None if unknown. A node without a module or known operator matches
    neither = nor !=.
    """
    if selector.field == "module":
        if part.module == UNKNOWN:  # the module of the fused node is a common prefix of its parts
            return selector.equal if _is_within(node.module, selector.value) else None
        return part.module is not None and _is_within(part.module, selector.value) == selector.equal
    if selector.value == node.op_type and all(each.op_type != selector.value for each in parts):
        return selector.equal  # an operator of ONNX Runtime: every part counts
    if part.op_type == UNKNOWN:
        return None
    return part.op_type is not None and (part.op_type == selector.value) == selector.equal


def _is_within(module: str | None, value: str) -> bool:
    """Whether `value` is a part of a module path."""
    return module is not None and f".{value}." in f".{module}."


def _fits(node: NodePlacement, selector: Selector, reasons: Mapping[tuple[str, str], tuple[str, ...]]) -> bool:
    """Whether the node is on the provider or has the reason. Unknown values match neither = nor !=."""
    if selector.field == "reason":
        return (selector.value in reasons.get((node.name, provider_of(node)), ())) == selector.equal
    return node.provider is not None and (node.provider == selector.value) == selector.equal
