"""Values that requirements and limits compare, with the nodes behind them. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from partita.check.requirements import PHASE_MEASURES, Limits, Measure, Requirement, Selector
from partita.compare.reports import PlacedRow, placed_rows
from partita.observations.names import CPU
from partita.observations.text_format import decimals, listing, name_some, plural, short_provider
from partita.options.fields import with_flags
from partita.partition_reports.groups import grouped, ran_by
from partita.partition_reports.outcome import (
    TOO_FEW,
    cache_text,
    failure_of,
    is_in_place,
    is_known,
    main_phase,
    status_of,
    too_few_steps,
)
from partita.partition_reports.placement import subgraph_copies
from partita.partition_reports.records import Phase, Report

SIGNS: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
Finding = tuple[bool, str]
"""Whether a condition holds, with the value and the nodes that violate it."""
MOST_NAMES = 6
"""Maximum listed names, or groups of names, that violate a condition."""
UNSEEN_COPIES = "some copies in control-flow subgraphs may be unknown"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value."""

    value: float | None
    """None: unknown."""
    text: str
    names: tuple[str, ...] = ()
    """Names of the counted nodes or copies."""
    upper_bound: float | None = None
    """Upper bound of a partly unknown value; None: `value`."""
    unknown_reason: str = ""
    """Why it is unknown or partly unknown."""


def decide(found: Figure, sign: str, limit: float) -> Finding:
    """Whether a figure meets a limit for every possible value."""
    holds = SIGNS[sign]
    if found.value is not None and not holds(found.value, limit):
        names = f": {name_some(found.names, MOST_NAMES)}" if found.names else ""
        return False, found.text + names
    if found.value is None or (found.upper_bound is not None and not holds(found.upper_bound, limit)):
        return False, f"cannot be confirmed{found.unknown_reason}"
    return True, found.text


def find(requirement: Requirement, report: Report) -> list[Finding]:
    """At least one finding for each measure; phases with the same value share one."""
    if failure_of(report) is not None:
        return [(False, "cannot be confirmed: the run failed")]
    selectors = [entry for entry in requirement.selectors if entry.field == "phase"]
    phases = [
        phase
        for phase in report.phases
        if is_known(phase) and all((phase.name == entry.value) == entry.equal for entry in selectors)
    ]
    found = []
    for measure in requirement.measures:
        if measure.field == "unavailable":
            found.append(decide(_count_unavailable(report), measure.sign, measure.value))
            continue
        if not phases:
            found.append((False, "the report has no selected phase with nodes"))
        same = grouped(phases, partial(_find_in_phase, requirement, measure, report))
        found += [
            (is_met, f"{text} in {listing(phase.name for phase in where)}{more}")
            for (is_met, text, more), where in same.items()
        ]
    return found


def _find_in_phase(requirement: Requirement, measure: Measure, report: Report, phase: Phase) -> tuple[bool, str, str]:
    """Whether one measure holds in one phase, its text, and the text after the phase name."""
    field = measure.field
    if field in PHASE_MEASURES:
        inside = subgraph_copies(phase)
        copies = None if inside is None else len(phase.copies) + inside
        value = copies if field == "copies" else phase.tokens_per_second
        if value is None:
            reason = UNSEEN_COPIES if field == "copies" else "the report does not have it"
            return False, f"{field} cannot be confirmed", f": {reason}"
        text = f"{value:,.0f}" if value == int(value) else decimals(value)
        return SIGNS[measure.sign](value, measure.value), f"{field} {text}", ""
    base, rows = _select(requirement.selectors, phase, report)
    is_absent = _is_absent(requirement.selectors, report)
    value = _share(rows, base) if field == "share" else None if is_absent else len(rows)
    if value is None and phase.folded_nodes is not None:
        return True, f"{field} does not apply: ONNX Runtime folded the whole graph at load time", ""
    if value is None:
        reason = "no phase has a node of this module" if is_absent else "no node of the file is selected"
        return False, f"{field} cannot be confirmed", f": {reason}"
    holds = SIGNS[measure.sign](value, measure.value)
    # Four digits of a share, to distinguish it from its limit.
    text = f"{field} {value:.4g}" if field == "share" else f"{field} {value:,}"
    omitted = phase.subgraphs.nodes - len(phase.subgraphs.function_nodes) if phase.subgraphs else 0
    note = f"; {plural(omitted, 'node')} in control-flow subgraphs not counted" if omitted else ""
    return holds, text, note + ("" if holds else _violators(measure, base, rows))


def _select(selectors: Sequence[Selector], phase: Phase, report: Report) -> tuple[list[PlacedRow], list[PlacedRow]]:
    """The rows of the selected operators and modules, and those of them on the provider and with the reason."""
    files = {name: {row.op_type for row in rows} for name, rows in ran_by(phase).items()}

    def matches(row: PlacedRow, selector: Selector) -> bool:
        """A row without a value matches neither = nor !=."""
        value: str | None
        if selector.field == "reason":
            return any(reason.reason == selector.value for reason in row.skipped.values()) == selector.equal
        if selector.field == "op":
            own = {node.op_type for node in row.executed if node.op_type not in files.get(node.name, ())}
            if selector.value in own:  # the operator of a fused node
                return selector.equal
            value = row.node.op_type
        elif selector.field == "module":
            value = row.node.module
            return value is not None and (f".{selector.value}." in f".{value}.") == selector.equal
        else:
            value = row.node.provider
        return value is not None and (value == selector.value) == selector.equal

    kinds = [entry for entry in selectors if entry.field in ("op", "module")]
    places = [entry for entry in selectors if entry.field in ("provider", "reason")]
    rows = placed_rows(report, phase, memcpy=True)
    base = [row for row in rows if all(matches(row, entry) for entry in kinds)]
    return base, [row for row in base if all(matches(row, entry) for entry in places)]


def _is_absent(selectors: Sequence[Selector], report: Report) -> bool:
    """Whether nodes of a module are selected by place, and no phase has a node of the module."""
    modules = [entry for entry in selectors if entry.field == "module" and entry.equal]
    if not modules or not any(entry.field in ("provider", "reason") for entry in selectors):
        return False
    return not any(_select(modules, phase, report)[0] for phase in report.phases)


def _share(rows: Sequence[PlacedRow], base: Sequence[PlacedRow]) -> float | None:
    """File nodes of `rows` as a share of those of `base`; None without any."""
    whole = sum(not row.is_added for row in base)
    return sum(not row.is_added for row in rows) / whole if whole else None


def _violators(measure: Measure, base: Sequence[PlacedRow], rows: Sequence[PlacedRow]) -> str:
    """The nodes that violate a measure: missing nodes, or excess nodes."""
    is_minimum = measure.sign in (">", ">=")
    if not rows:
        return ": no node is selected" if is_minimum else ""
    selected = set(map(id, rows))
    named = [row for row in base if id(row) not in selected] if is_minimum else rows
    return f"{', without' if is_minimum else ':'} {name_some(_describe(row) for row in named)}"


def _describe(row: PlacedRow) -> str:
    """The node with its operator, provider and reasons."""
    where = short_provider(row.node.provider) if row.node.provider else "an unknown provider"
    reasons = dict.fromkeys(reason.reason for reason in row.skipped.values())
    own = [node.name for node in row.executed if node.provider == row.node.provider]
    inside = f" in {listing(own)}" if own and row.part_of else ""
    reason = f": {', '.join(reasons)}" if reasons else ""
    return f"{row.node.name} ({row.node.op_type or 'unknown'}{inside} on {where}{reason})"


# Figures of a whole report


def find_limits(report: Report, limits: Mapping[str, float]) -> dict[str, Finding]:
    """Option with its value -> whether it holds. `limits`: name of the option -> value."""
    found = {}
    for name, value in limits.items():
        option = with_flags(f"`{name}={value}`" if name != "cache_in_place" else "`cache_in_place=True`")
        measure, sign = LIMIT_FIGURES[name]
        if failure_of(report) is not None:
            found[option] = (False, "cannot be confirmed: the run failed")
        else:
            found[option] = decide(measure(report), sign, value)
    return found


def exceeded_limits(report: Report, limits: Limits) -> tuple[str, ...]:
    """One sentence for each exceeded limit, with values and nodes."""
    if not any(phase.nodes for phase in report.phases):
        return ()
    found = find_limits(report, limits.as_dict())
    return tuple(f"{option}: {text}" for option, (is_met, text) in found.items() if not is_met)


def _in_worst_phase(figure: Callable[[Report, Phase], Figure]) -> Callable[[Report], Figure]:
    """The figure of the phase in which it may be largest, the last of several."""

    def worst(report: Report) -> Figure:
        figures = [figure(report, phase) for phase in report.phases if is_known(phase)]
        return max(reversed(figures), key=lambda each: (each.upper_bound or 0, each.value or 0))

    return worst


def _cpu_nodes(_: Report, phase: Phase) -> Figure:
    """Nodes on the CPU provider, with control-flow subgraphs. Nodes without a known provider may be on it."""
    bodies = phase.subgraphs
    found = [(node.name, node.op_type) for node in phase.nodes if node.provider == CPU]
    found += [(node.name, node.op_type) for node in (bodies.on_cpu if bodies is not None else ())]
    unknown = [node.name for node in phase.nodes if node.provider is None]
    is_listed = bodies is None or bodies.is_known
    reason = f"no source names a provider for {name_some(unknown)}"
    return Figure(
        value=len(found),
        text=f"{plural(len(found), 'node')} on {CPU} in {phase.name}",
        names=tuple(f"{name} ({op_type})" if op_type else name for name, op_type in found),
        upper_bound=len(found) + len(unknown) if is_listed else math.inf,
        unknown_reason=f" in {phase.name}: {reason if is_listed else 'nodes in control-flow subgraphs are not listed'}",
    )


def _count_memcpy_nodes(report: Report) -> Figure:
    """Memcpy nodes of decode or the only phase, including control-flow subgraphs."""
    phase = main_phase(report)
    assert phase is not None
    names = [copy.name for copy in phase.copies if copy.kind == "memcpy_node"]
    inside = (phase.subgraphs.copies or 0) if phase.subgraphs else 0
    count = len(names) + inside
    return Figure(
        value=count,
        text=f"{plural(count, 'Memcpy node')} in {phase.name}",
        names=(*names, f"{inside} in control-flow subgraphs") if inside else tuple(names),
        upper_bound=math.inf if subgraph_copies(phase) is None else None,
        unknown_reason=f" in {phase.name}: {UNSEEN_COPIES}",
    )


def _count_copy_bytes(report: Report) -> Figure:
    """Bytes copied per run of decode or the only phase; unbounded with a copy of unknown size."""
    phase = main_phase(report)
    assert phase is not None
    total = sum(copy.bytes_per_run or 0 for copy in phase.copies)
    unknown = [copy.name for copy in phase.copies if copy.bytes_per_run is None]
    if subgraph_copies(phase) != 0:
        unknown.append("copies in control-flow subgraphs")
    more = f" and {plural(len(unknown), 'copy')} of unknown size" if unknown else ""
    return Figure(
        value=total,
        text=f"{total:,} bytes in {plural(len(phase.copies), 'copy')} per run of {phase.file} ({phase.name}){more}",
        upper_bound=math.inf if unknown else None,
        unknown_reason=f" in {phase.name}: the size of {plural(len(unknown), 'copy')} is unknown: {name_some(unknown)}",
    )


def _slow_nodes(report: Report, phase: Phase) -> Figure:
    """Nodes on slow kernel paths; nodes with an unknown kernel may be on one."""
    entries = [entry for entry in report.kernel_paths if entry.phase == phase.name]
    slow = [f"{entry.node} ({entry.op_type}: {entry.path})" for entry in entries if entry.is_slow]
    unknown = [entry.node for entry in entries if entry.evidence_kind == "none"]
    return Figure(
        value=len(slow),
        text=f"{plural(len(slow), 'node')} on a slow kernel path in {phase.name}",
        names=tuple(slow),
        upper_bound=len(slow) + len(unknown),
        unknown_reason=f" in {phase.name}: the kernel is unknown for {name_some(unknown)}",
    )


def _unexplained(report: Report, phase: Phase) -> Figure:
    """Fallbacks without a reason."""
    found = [entry for entry in report.fallbacks if entry.phase == phase.name and "unexplained" in entry.codes]
    nodes = tuple(f"{entry.node} ({entry.op_type or 'unknown'})" for entry in found)
    return Figure(len(nodes), f"{plural(len(nodes), 'unexplained fallback')} in {phase.name}", nodes, len(nodes))


def _count_unavailable(report: Report) -> Figure:
    """Installed providers that could not start; providers missing from the build do not count."""
    lost = [entry for entry in report.chain if entry.status == "unavailable" and entry.reason != "not_in_build"]
    named = (f"{entry.provider} ({entry.reason or 'no reason known'}: {entry.evidence})" for entry in lost)
    return Figure(len(lost), f"{plural(len(lost), 'provider')} could not start", tuple(named))


def _find_cache(report: Report) -> Figure:
    """1 if every state stayed in one buffer, 0 if one did not; unknown if not observed."""
    cache, held = report.cache, is_in_place(report.cache)
    if cache is None or status_of(cache) == "no_cache":
        return Figure(None, "", unknown_reason=": the report has no cache")
    moved = tuple(entry.name for entry in cache.entries if not entry.in_place)
    text = f"cache {cache_text(cache)}"
    return Figure(None if held is None else float(held), text, moved, unknown_reason=f": {text}")


def _find_speed(report: Report) -> Figure:
    """Tokens per second of decode or the only phase."""
    phase = repeated_phase(report.phases)
    speed = phase.tokens_per_second
    reason = "a dry run has no times" if report.dry_run is not None else f"the report has no times of {phase.name}"
    few = f", {plural(phase.steps, 'step')}: {TOO_FEW}" if too_few_steps(phase) else ""
    return Figure(speed, f"{decimals(speed)} tokens/s in {phase.name}{few}", unknown_reason=f": {reason}")


def repeated_phase(phases: Sequence[Phase]) -> Phase:
    """Decode, or the only phase."""
    return next((phase for phase in phases if phase.name == "decode"), phases[-1])


LIMIT_FIGURES: dict[str, tuple[Callable[[Report], Figure], str]] = {
    "max_cpu_nodes": (_in_worst_phase(_cpu_nodes), "<="),
    "max_copies": (_count_memcpy_nodes, "<="),
    "max_copy_bytes_per_token": (_count_copy_bytes, "<="),
    "max_slow_nodes": (_in_worst_phase(_slow_nodes), "<="),
    "max_unexplained": (_in_worst_phase(_unexplained), "<="),
    "cache_in_place": (_find_cache, "="),
    "min_tokens_per_second": (_find_speed, ">="),
}
"""Name of the option -> its figure, and how the figure is compared."""
