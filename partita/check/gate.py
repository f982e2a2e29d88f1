"""Checks a report against requirements, limits and a baseline, for CI; the result and its document. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from pydantic import Field

from partita.check.requirements import Condition, Limits, Requirement
from partita.compare.document import describe_changes
from partita.compare.reports import PlacedRow, compare, placed_rows, slowdown
from partita.errors import ReportError, UsageError
from partita.observations.grouping import grouped
from partita.observations.names import CPU
from partita.observations.records import Record
from partita.observations.text_format import decimals, listing, name_some, plural, short_provider
from partita.options.fields import with_flags
from partita.options.reports import CheckOptions
from partita.partition_reports.outcome import cache_text
from partita.partition_reports.phase_records import TOO_FEW, NodePlacement, Phase, SubgraphNode, Subgraphs
from partita.partition_reports.records import Report
from partita.partition_reports.render.show import Views, terminal_view
from partita.partition_reports.sections.model import Document, Section, table

BASELINE = ("preferred_provider", "phases", "nodes", "reasons", "copy_count", "copy_bytes", "cache")
"""Sections of a comparison in which a change for the worse fails."""
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
FOLDED = "ONNX Runtime folded the whole graph at load time"
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
    before_names: str = ": "


FigureOf = Callable[[Report, Phase], Figure]


def decide(found: Figure, sign: str, limit: float, where: str = "") -> Finding:
    """Whether a figure meets a limit for every possible value. `where`: its phases, after the text."""
    holds = SIGNS[sign]
    if found.value is not None and not holds(found.value, limit):
        names = f"{found.before_names}{name_some(found.names, MOST_NAMES)}" if found.names else ""
        return False, f"{found.text}{where}{names}"
    if found.value is None or (found.upper_bound is not None and not holds(found.upper_bound, limit)):
        return False, f"cannot be confirmed{where}: {found.unknown_reason}"
    return True, f"{found.text}{where}"


def find(requirement: Requirement, report: Report) -> Finding:
    """Whether every measure holds in every selected phase. Phases with the same value share a text."""
    if report.failure_text is not None:
        return False, "cannot be confirmed: the run failed"
    wanted = [each for each in requirement.selectors if each.field == "phase"]
    phases = [
        phase
        for phase in report.phases
        if phase.is_known and all((phase.name == each.value) == each.equal for each in wanted)
    ]
    found: list[Finding] = [] if phases else [(False, "the report has no selected phase with nodes")]
    for measure in requirement.measures:
        nodes = partial(_count_nodes, requirement.selectors, measure)
        figure, in_main = FIGURES.get(measure.field, (nodes, False))
        folded = [phase for phase in phases if phase.folded_nodes is not None and measure.field not in FIGURES]
        folded = [phase for phase in folded if nodes(report, phase).value is None]
        if folded:
            found.append((True, f"{measure.field} does not apply in {listing(each.name for each in folded)}: {FOLDED}"))
        others = [phase for phase in phases if phase not in folded]
        measured = [phase for phase in others if not in_main or phase is report.main_phase]
        for value, where in grouped(measured, partial(figure, report)).items():
            found.append(decide(value, measure.sign, measure.limit, f" in {listing(phase.name for phase in where)}"))
    failed = [text for is_met, text in found if not is_met]
    return not failed, "; ".join(failed or [text for _, text in found])


def requirements_of(options: Limits | CheckOptions) -> list[Requirement]:
    """The limits of a command as requirements: a maximum, a minimum, or a condition that is 1 if it holds."""
    given = {name: getattr(options, name, None) for name in FIGURES}
    return [
        Requirement(with_flags(f"`{name}={value}`"), (), (Condition(name, "<=" if "max" in name else ">=", "", value),))
        for name, value in given.items()
        if value is not None and value is not False
    ]


def exceeded_limits(report: Report, limits: Limits) -> tuple[str, ...]:
    """One sentence for each exceeded limit, with values and nodes."""
    if not any(phase.nodes for phase in report.phases):
        return ()
    found = [(each.text, *find(each, report)) for each in requirements_of(limits)]
    return tuple(f"{option}: {text}" for option, is_met, text in found if not is_met)


# Figures


def _count_copies(_: Report, phase: Phase) -> Figure:
    """Every copy of one run."""
    inside = phase.subgraph_copies
    count = None if inside is None else len(phase.copies) + inside
    return Figure(count, f"copies {count}", unknown_reason=UNSEEN_COPIES)


def _speed(report: Report, phase: Phase) -> Figure:
    """Tokens per second."""
    reason = "a dry run has no times" if report.dry_run is not None else "the report has no times"
    speed, few = phase.tokens_per_second, f" ({plural(phase.steps, 'step')}: {TOO_FEW})" if phase.has_few_steps else ""
    return Figure(speed, "" if speed is None else f"{decimals(speed)} tokens/s{few}", unknown_reason=reason)


def _counted(noun: str, names: Iterable[str], rest: str = "", unknown: float = 0, unknown_reason: str = "") -> Figure:
    """A number of named things. `unknown`: how many more there may be."""
    listed = tuple(names)
    return Figure(len(listed), f"{plural(len(listed), noun)}{rest}", listed, len(listed) + unknown, unknown_reason)


def _count_unavailable(report: Report, _: Phase) -> Figure:
    """Installed providers that could not start; providers missing from the build do not count."""
    lost = [entry for entry in report.unavailable if entry.reason != "not_in_build"]
    named = (f"{entry.provider} ({entry.reason or 'no reason known'}: {entry.evidence})" for entry in lost)
    return _counted("unavailable provider", named)


def _cpu_nodes(_: Report, phase: Phase) -> Figure:
    """Nodes on the CPU provider, with control-flow subgraphs. Nodes without a known provider may be on it."""
    bodies = phase.subgraphs or Subgraphs(nodes=0, copies=None)
    found: list[NodePlacement | SubgraphNode] = [node for node in phase.nodes if node.provider == CPU]
    found += bodies.on_cpu
    names = (f"{node.name} ({node.op_type})" if node.op_type else node.name for node in found)
    if not bodies.is_known:
        return _counted("node", names, f" on {CPU}", math.inf, "nodes in control-flow subgraphs are not listed")
    unknown = [node.name for node in phase.nodes if node.provider is None]
    reason = f"no source names a provider for {name_some(unknown)}"
    return _counted("node", names, f" on {CPU}", len(unknown), reason)


def _memcpy_nodes(_: Report, phase: Phase) -> Figure:
    """Memcpy nodes, including control-flow subgraphs."""
    names = [copy.name for copy in phase.copies if copy.kind == "memcpy_node"]
    inside = (phase.subgraphs.copies or 0) if phase.subgraphs else 0
    count = len(names) + inside
    names += [f"{inside} in control-flow subgraphs"] if inside else []
    most = math.inf if phase.subgraph_copies is None else None
    return Figure(count, plural(count, "Memcpy node"), tuple(names), most, UNSEEN_COPIES)


def _copied_bytes(_: Report, phase: Phase) -> Figure:
    """Bytes copied per run; unbounded with a copy of unknown size."""
    total = sum(copy.bytes_per_run or 0 for copy in phase.copies)
    unknown = [copy.name for copy in phase.copies if copy.bytes_per_run is None]
    unknown += ["copies in control-flow subgraphs"] if phase.subgraph_copies != 0 else []
    more = f" and {plural(len(unknown), 'copy')} of unknown size" if unknown else ""
    return Figure(
        total,
        f"{total:,} bytes per run in {plural(len(phase.copies), 'copy')}{more}",
        upper_bound=math.inf if unknown else None,
        unknown_reason=f"the size of {plural(len(unknown), 'copy')} is unknown: {name_some(unknown)}",
    )


def _slow_nodes(report: Report, phase: Phase) -> Figure:
    """Nodes on slow kernel paths; nodes with an unknown kernel may be on one."""
    entries = [entry for entry in report.kernel_paths if entry.phase == phase.name]
    slow = (f"{entry.node} ({entry.op_type}: {entry.path})" for entry in entries if entry.is_slow)
    unknown = [entry.node for entry in entries if entry.evidence_kind == "none"]
    reason = f"the kernel is unknown for {name_some(unknown)}"
    return _counted("node", slow, " on a slow kernel path", len(unknown), reason)


def _unexplained(report: Report, phase: Phase) -> Figure:
    """Fallbacks without a reason."""
    found = [entry for entry in report.fallbacks if entry.phase == phase.name and "unexplained" in entry.codes]
    return _counted("unexplained fallback", (f"{entry.node} ({entry.op_type or 'unknown'})" for entry in found))


def _cache_in_place(report: Report, _: Phase) -> Figure:
    """1 if every state stayed in one buffer, 0 if one did not; unknown if not observed."""
    cache, held = report.cache, report.cache_in_place
    if cache is None or cache.status == "no_cache":
        return Figure(None, "", unknown_reason="the report has no cache")
    moved, text = tuple(entry.name for entry in cache.entries if not entry.in_place), f"cache {cache_text(cache)}"
    return Figure(None if held is None else float(held), text, moved, unknown_reason=text)


FIGURES: Mapping[str, tuple[FigureOf, bool]] = {
    "copies": (_count_copies, False),
    "tokens_per_second": (_speed, False),
    "unavailable": (_count_unavailable, False),
    "max_cpu_nodes": (_cpu_nodes, False),
    "max_copies": (_memcpy_nodes, True),
    "max_copy_bytes_per_token": (_copied_bytes, True),
    "max_slow_nodes": (_slow_nodes, False),
    "max_unexplained": (_unexplained, False),
    "cache_in_place": (_cache_in_place, True),
    "min_tokens_per_second": (_speed, True),
}
"""Measure of a phase, or option with a limit -> its figure, and whether only decode or the only phase counts."""


def _count_nodes(selectors: Sequence[Condition], measure: Condition, report: Report, phase: Phase) -> Figure:
    """Number of the selected nodes, or their share; with the nodes that violate a minimum or a maximum."""
    base, rows = _select(selectors, phase, report)
    value: float | None = None if _is_absent(selectors, report) else len(rows)
    reason, text = "no phase has a node of this module", f"nodes {len(rows):,}"
    if measure.field == "share":
        part, whole = (sum(not row.is_added for row in each) for each in (rows, base))
        value = part / whole if whole else None
        # Four digits, to distinguish it from its limit.
        reason, text = "no node of the file is selected", f"share {value or 0:.4g}"
    omitted = phase.subgraphs.nodes - len(phase.subgraphs.function_nodes) if phase.subgraphs else 0
    text += f" ({plural(omitted, 'node')} in control-flow subgraphs not counted)" if omitted else ""
    if measure.sign not in (">", ">="):
        return Figure(value, text, tuple(map(_describe_node, rows)), unknown_reason=reason)
    selected = set(map(id, rows))
    others = tuple(_describe_node(row) for row in base if id(row) not in selected)
    return Figure(value, text, others, unknown_reason=reason, before_names=", without ")


def _select(selectors: Sequence[Condition], phase: Phase, report: Report) -> tuple[list[PlacedRow], list[PlacedRow]]:
    """The rows of the selected operators and modules, and those of them on the provider and with the reason."""
    files = {name: {row.op_type for row in rows} for name, rows in phase.ran_by.items()}

    def matches(row: PlacedRow, selector: Condition) -> bool:
        """A row without a value matches neither = nor !=; no reason is a value."""
        node = row.node
        values: set[str] = {reason.reason for reason in row.skipped.values()}
        if selector.field == "op":
            fused = (each.op_type for each in row.executed if each.op_type not in files.get(each.name, ()))
            values = {name for name in (node.op_type, *fused) if name is not None}
        elif selector.field == "module":  # every part of its path
            names = node.module.split(".") if node.module else []
            values = {".".join(names[start:end]) for start, end in combinations(range(len(names) + 1), 2)}
        elif selector.field == "provider":
            values = {node.provider} if node.provider is not None else set()
        return bool(values or selector.field == "reason") and (selector.value in values) == selector.equal

    kinds = [entry for entry in selectors if entry.field in ("op", "module")]
    places = [entry for entry in selectors if entry.field in ("provider", "reason")]
    rows = placed_rows(report, phase, memcpy=True)
    base = [row for row in rows if all(matches(row, entry) for entry in kinds)]
    return base, [row for row in base if all(matches(row, entry) for entry in places)]


def _is_absent(selectors: Sequence[Condition], report: Report) -> bool:
    """Whether nodes of a module are selected by place, and no phase has a node of the module."""
    modules = [entry for entry in selectors if entry.field == "module" and entry.equal]
    if not modules or not any(entry.field in ("provider", "reason") for entry in selectors):
        return False
    return not any(_select(modules, phase, report)[0] for phase in report.phases)


def _describe_node(row: PlacedRow) -> str:
    """The node with its operator, provider and reasons."""
    where = short_provider(row.node.provider) if row.node.provider else "an unknown provider"
    reasons = dict.fromkeys(reason.reason for reason in row.skipped.values())
    own = [node.name for node in row.executed if node.provider == row.node.provider]
    inside = f" in {listing(own)}" if own and row.part_of else ""
    reason = f": {', '.join(reasons)}" if reasons else ""
    return f"{row.node.name} ({row.node.op_type or 'unknown'}{inside} on {where}{reason})"


# Results


class Outcome(Record):
    """Result of one requirement."""

    check: str
    """The option as the user wrote it; `report` for checks of every report."""
    met: bool
    detail: str
    """The value, and the nodes that violate it."""


class GateResult(Record):
    """Results of all requirements."""

    schema_id: str = Field(default="partita.check/1", alias="schema")
    report: str
    baseline: str | None
    passed: bool
    outcomes: tuple[Outcome, ...]

    @classmethod
    def of(cls, name: str, findings: Mapping[str, Finding], baseline: str | None = None) -> GateResult:
        """The result for the report `name`. `findings`: by check."""
        outcomes = tuple(Outcome(check=check, met=met, detail=text) for check, (met, text) in findings.items())
        return cls(report=name, baseline=baseline, passed=all(each.met for each in outcomes), outcomes=outcomes)


def check(
    report: Report,
    options: CheckOptions,
    name: str,
    baseline: tuple[str, Report] | None = None,
    requirements: Sequence[Requirement] = (),
) -> GateResult:
    """Check a report. `name` and the first of `baseline`: names of the two reports. `requirements`: of the options.

    Raises ReportError for a baseline of another model, and UsageError for `max_slowdown` without one.
    """
    if options.max_slowdown is not None and baseline is None:
        raise UsageError("`max_slowdown` needs `baseline` to compare with")
    other, compared = baseline or (None, None)
    invalid = [*_invalid(report, "the report"), *(_invalid(compared, "the baseline") if compared else ())]
    findings: dict[str, Finding] = {"report": (False, "; ".join(invalid))} if invalid else {}
    if report.known_phases:
        findings |= {each.text: find(each, report) for each in (*requirements_of(options), *requirements)}
        if compared is not None and report.failure_text is None:
            findings |= _compare(report, options, name, str(other), compared)
    return GateResult.of(name, findings, other)


def _invalid(report: Report, name: str) -> Iterator[str]:
    """Why nothing can be confirmed: the run failed, or the report is inconsistent or has no nodes."""
    if not report.known_phases:
        yield f"no phase of {name} has a node, so nothing can be confirmed"
    if (reason := report.failure_text) is not None:
        yield f"the run of {name} failed, so nothing can be confirmed: {reason}"
    failed = [f"{entry.name} ({entry.detail})" for entry in report.checks if not entry.passed]
    if failed:
        yield f"{name} is inconsistent: {'; '.join(failed)}"


def _compare(report: Report, options: CheckOptions, name: str, other: str, baseline: Report) -> dict[str, Finding]:
    """Check -> whether the report is not worse than a baseline. Raises ReportError for another model."""
    found = compare(baseline, report, names=(other, name))
    if found.unrelated_reason:
        raise ReportError(
            f"{other} cannot be a baseline for {name}: {found.unrelated_reason}; give a report of the same model"
        )
    findings: dict[str, Finding] = {}
    if (limit := options.max_slowdown) is not None:
        slower, text = slowdown(baseline, report)
        findings[with_flags(f"`max_slowdown={limit}`")] = decide(Figure(slower, text, unknown_reason=text), "<=", limit)
    for section in BASELINE:
        worse = [change for change in found.of(section) if change.effect == "worse"]
        text = describe_changes(worse, found) if worse else "not worse than the baseline"
        findings[f"--baseline: {section.replace('_', ' ')}"] = not worse, text
    return findings


# Document


def headline(result: GateResult) -> str:
    """One line: failed requirements, or that all hold."""
    if result.passed:
        return f"{result.report}: {plural(len(result.outcomes), 'check')} passed"
    failed = [outcome.check for outcome in result.outcomes if not outcome.met]
    count = f"{len(failed)} of {plural(len(result.outcomes), 'check')}"
    return f"{result.report}: {count} failed: {', '.join(failed)}"


def document(result: GateResult) -> Document:
    """The document; failed requirements come first."""
    ranked = sorted(result.outcomes, key=lambda outcome: outcome.met)
    heads = ("requirement", "passed", "value")
    rows = [(outcome.check, "yes" if outcome.met else "NO", outcome.detail) for outcome in ranked]
    section = Section("checks", "Checks", (table("Requirements", heads, rows, obvious=True),))
    return Document("Check of a report", result.report, (headline(result),), (section,))


def _show(result: GateResult, console: Any) -> None:
    """Print one line per failed requirement, or one if all hold. Lines are not wrapped, for searching logs."""
    from partita.partition_reports.render.terminal import BOLD, Page

    page = Page(console)
    if result.passed:
        checked = "; ".join(f"{outcome.check} ({outcome.detail})" for outcome in result.outcomes)
        page.put(f"{headline(result)}: {checked}", BOLD)
    for outcome in result.outcomes:
        if not outcome.met:
            page.put(f"FAILED {outcome.check}: {outcome.detail}")


VIEWS = Views(document, own={"text": terminal_view("text", _show)})
