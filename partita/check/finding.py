"""Evaluation of requirements on a report: the value of each measure, and the nodes that violate it. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from partita.check.baseline import COMPARED, BaselineComparison
from partita.check.measures import MEASURES, NOT_ALL_SEEN, Measurement
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
from partita.partition_reports.copies import subgraph_copies
from partita.partition_reports.file_nodes import ran_by, report_rows
from partita.partition_reports.groups import provider_of, total_us
from partita.partition_reports.outcome import failure_of, is_known
from partita.partition_reports.records import FileNode, NodePlacement, Phase, Report

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

    met: bool
    figure: str
    more: str = ""
    """The nodes that violate it."""


def find(
    requirement: Requirement, report: Report, comparison: BaselineComparison | None = None
) -> list[tuple[bool, str]]:
    """Whether each measure holds, with a text; phases with the same outcome share a text.

    Measures of `LOST` need the comparison with a baseline. Without a matching phase there is one result, which does not
    hold.
    """
    if failure_of(report) is not None:
        return [(False, "cannot be confirmed: the run failed")]
    whole = [measure for measure in requirement.measures if measure.field in STATED or measure.field in LOST]
    found = [_weigh_whole(measure, report, comparison) for measure in whole]
    parts = [measure for measure in requirement.measures if measure not in whole]
    return [*found, *(_find_in_phases(requirement, parts, report) if parts else ())]


def _weigh_whole(measure: Measure, report: Report, comparison: BaselineComparison | None) -> tuple[bool, str]:
    """One measure of the whole report. Raises UsageError if it needs a baseline and there is none."""
    if measure.field in STATED:
        return _decide(MEASURES[measure.field](report), measure)
    if comparison is None:
        raise UsageError(f"{measure.field} needs `baseline`: {LOST[measure.field]}")
    return _decide(COMPARED[measure.field](comparison), measure)


def _decide(found: Measurement, measure: Measure) -> tuple[bool, str]:
    """Whether the measure holds for every possible value of `found`, with the text."""
    holds = COMPARE[measure.sign]
    if found.value is None or not holds(found.value, measure.value):
        return False, found.unmet_text or found.held
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
    return [(found.met, f"{found.figure} in {listing(names)}{found.more}") for found, names in alike.items()]


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
    shown = (
        f"{value:,.0f}" if value == int(value) and not measure.field.endswith("share") else _share_text(measure, value)
    )
    omitted = phase.subgraphs.nodes - len(phase.subgraphs.parts) if phase.subgraphs and measure.field in COUNTED else 0
    bodies = f"; {plural(omitted, 'node')} in control-flow subgraphs not counted" if omitted else ""
    return Finding(holds, f"{measure.field} {shown}", bodies + ("" if holds else chosen.blame(measure)))


def _share_text(measure: Measure, value: float) -> str:
    """A share with four decimals, to distinguish it from its limit; other numbers with three digits."""
    return f"{value:.4g}" if measure.field.endswith("share") else decimals(value)


def _measure_phase(field: str, phase: Phase) -> float | None:
    """A figure of a whole phase; None if unknown, as the size of copies in control-flow subgraphs."""
    inside = subgraph_copies(phase)
    figures: dict[str, float | None] = {
        "partitions": len(phase.partitions),
        "copies": None if inside is None else len(phase.copies) + inside,
        "copy_bytes_per_token": phase.cost.copy_bytes_per_token if phase.cost and inside == 0 else None,
        "tokens_per_second": phase.tokens_per_second,
        "p50_ms": phase.step_p50_ms,
    }
    return figures[field]


@dataclass(frozen=True, slots=True)
class Row:
    """A file node, or a node that ONNX Runtime added, with the executed nodes that ran it."""

    node: FileNode | NodePlacement
    executed: tuple[NodePlacement, ...]
    reasons: tuple[str, ...]
    """Reasons for every skipped preferred provider."""
    fused_operators: frozenset[str]
    """Operators of its executed nodes that none of their file nodes has."""

    @property
    def is_added(self) -> bool:
        """Whether ONNX Runtime added it."""
        return isinstance(self.node, NodePlacement)

    def matches(self, selector: Selector) -> bool:
        """Whether the row matches a selector. A row without a value matches neither = nor !=."""
        if selector.field == "reason":
            return (selector.value in self.reasons) == selector.equal
        if selector.field == "op":
            if selector.value in self.fused_operators:
                return selector.equal
            return self.node.op_type is not None and (self.node.op_type == selector.value) == selector.equal
        if selector.field == "module":
            module = self.node.module
            return module is not None and (f".{selector.value}." in f".{module}.") == selector.equal
        return self.node.provider is not None and (self.node.provider == selector.value) == selector.equal

    def describe(self) -> str:
        """The node with provider and reasons."""
        where = short_provider(self.node.provider) if self.node.provider else "an unknown provider"
        why = f": {', '.join(self.reasons)}" if self.reasons else ""
        own = [node.name for node in self.executed if node.provider == self.node.provider]
        inside = f" in {listing(own)}" if own and self.node.name not in own else ""
        return f"{self.node.name} ({self.node.op_type or 'unknown'}{inside} on {where}{why})"


def rows_of(phase: Phase, report: Report) -> list[Row]:
    """The rows of a phase: file nodes that were not folded, then nodes that ONNX Runtime added."""
    executed = {node.name: node for node in phase.nodes}
    operators = {name: {row.op_type for row in rows} for name, rows in ran_by(phase).items()}
    codes: dict[tuple[str, str], tuple[str, ...]] = {
        (entry.node, entry.provider): entry.codes for entry in report.fallbacks if entry.phase == phase.name
    }
    rows = []
    for node in report_rows(phase):
        names = node.ran_as if isinstance(node, FileNode) else (node.name,)
        found = tuple(executed[name] for name in names if name in executed)
        made = {(each.name, each.op_type) for each in found if each.op_type}
        homes = [(name, provider_of(executed.get(name, node))) for name in names]
        rows.append(
            Row(
                node=node,
                executed=found,
                reasons=tuple(dict.fromkeys(code for home in homes for code in codes.get(home, ()))),
                fused_operators=frozenset(op for name, op in made if op not in operators.get(name, ())),
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class Chosen:
    """The rows that a requirement selects in one phase."""

    base: tuple[Row, ...]
    """Rows of the operator and module."""
    rows: tuple[Row, ...]
    """Rows of `base` on the provider and with the reason."""
    nowhere: bool = False
    """No phase has a node of the module of a share: it was renamed, folded or never existed."""

    @classmethod
    def of(cls, requirement: Requirement, phase: Phase, report: Report) -> Chosen:
        """The rows of a phase that a requirement selects."""
        kinds = [entry for entry in requirement.selectors if entry.field in ("op", "module")]
        places = [entry for entry in requirement.selectors if entry.field in ("provider", "reason")]
        base = tuple(row for row in rows_of(phase, report) if all(map(row.matches, kinds)))
        return cls(
            base=base,
            rows=tuple(row for row in base if all(map(row.matches, places))),
            nowhere=bool(places) and _is_nowhere([entry for entry in kinds if entry.field == "module"], report),
        )

    def measure(self, field: str) -> float | None:
        """A figure of the selected rows; None if it is unknown or `base` is empty."""
        if field == "nodes":
            return None if self.nowhere else len(self.rows)
        if field == "share":
            whole = sum(not row.is_added for row in self.base)
            return sum(not row.is_added for row in self.rows) / whole if whole else None
        whole_us, part_us = _total_us(self.base), _total_us(self.rows) if self.rows else 0.0
        return part_us / whole_us if whole_us and part_us is not None else None

    def why_unknown(self, measure: Measure, phase: Phase) -> str:
        """Why a figure is unknown."""
        if measure.field == "copies":
            return NOT_ALL_SEEN
        if measure.field == "copy_bytes_per_token" and subgraph_copies(phase) != 0:
            return "the size of copies in control-flow subgraphs is unknown"
        if measure.field in MEASURED:
            return "the report does not have it"
        if self.nowhere:
            return "no phase has a node of this module"
        return (
            "the time is unknown" if any(not row.is_added for row in self.base) else "no node of the file is selected"
        )

    def blame(self, measure: Measure) -> str:
        """The nodes that violate the measure: missing nodes, or excess nodes."""
        if measure.field not in COUNTED:
            return ""
        missing = measure.sign in (">", ">=")
        if not self.rows:
            return ": no node is selected" if missing else ""
        selected = set(map(id, self.rows))
        named = [row for row in self.base if id(row) not in selected] if missing else self.rows
        return f"{', without' if missing else ':'} {name_some([row.describe() for row in named])}"


def _total_us(rows: Iterable[Row]) -> float | None:
    """Time of the executed nodes of some rows, each once; None if none is known."""
    return total_us({node.position: node for row in rows for node in row.executed}.values())


def _is_nowhere(modules: Sequence[Selector], report: Report) -> bool:
    """Whether modules are selected and no row of any phase is of these modules."""
    rows = (row for phase in report.phases for row in rows_of(phase, report))
    return any(entry.equal for entry in modules) and not any(all(map(row.matches, modules)) for row in rows)
