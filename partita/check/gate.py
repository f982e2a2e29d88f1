"""Checks a report against requirements, limits and a baseline, for CI; the result and its document. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from partita.check.measures import Figure, decide, find, find_limits, repeated_phase
from partita.check.requirements import Limits, Requirement
from partita.compare.document import describe, display_name
from partita.compare.reports import compare
from partita.compare.rows import Change, Comparison, count_names
from partita.errors import ReportError
from partita.observations.records import Record
from partita.observations.text_format import decimals, listing, name_some, plural
from partita.options.fields import with_flags
from partita.partition_reports.cost import rows_of
from partita.partition_reports.groups import grouped
from partita.partition_reports.outcome import failure_of, is_known
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.render.show import Views, terminal_view
from partita.partition_reports.sections.model import Document, Section, table

BASELINE = {
    "preferred_provider": "preferred provider",
    "phases": "phases",
    "nodes": "nodes",
    "reasons": "reasons",
    "copy_count": "copies",
    "copy_bytes": "bytes copied",
    "cache": "cache",
}
"""Sections of a comparison in which a change for the worse fails -> their name in the result."""
SAME_ROWS = 1.1
"""Maximum ratio of active rows for comparing times per token: rows share the weights that a step reads."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Limits and requirements of a report. None: no requirement."""

    limits: Limits = Limits()
    max_unexplained: int | None = None
    """Maximum number of nodes without a reason in a phase."""
    cache_in_place: bool = False
    min_tokens_per_second: float | None = None
    """Minimum speed of decode, or of the only phase."""
    requirements: tuple[Requirement, ...] = ()
    max_slowdown: float | None = None
    """Maximum increase of the baseline's time per token: 0.1 allows 10 % more."""

    def by_name(self) -> Mapping[str, float]:
        """Name of an option -> its limit, without options that compare with a baseline."""
        others = {
            "max_unexplained": self.max_unexplained,
            "cache_in_place": 1 if self.cache_in_place else None,
            "min_tokens_per_second": self.min_tokens_per_second,
        }
        return {**self.limits.as_dict(), **{name: value for name, value in others.items() if value is not None}}


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


def check(report: Report, gate: Gate, name: str, baseline: tuple[str, Report] | None = None) -> GateResult:
    """Check a report. `name` and the first of `baseline`: names of the two reports.

    Raises ReportError for a baseline of another model.
    """
    outcomes = [*_validity(report, "the report")]
    outcomes += [] if baseline is None else _validity(baseline[1], "the baseline")
    if any(map(is_known, report.phases)):
        limits = find_limits(report, gate.by_name())
        outcomes += [Outcome(check=option, met=met, detail=detail) for option, (met, detail) in limits.items()]
        for requirement in gate.requirements:
            found = find(requirement, report)
            bad = [text for is_met, text in found if not is_met]
            detail = "; ".join(bad or [text for _, text in found])
            outcomes.append(Outcome(check=f"{with_flags('`require`')} {requirement.text}", met=not bad, detail=detail))
        outcomes += [] if baseline is None else _compare(report, gate, name, *baseline)
    return GateResult(
        report=name,
        baseline=baseline[0] if baseline else None,
        passed=all(outcome.met for outcome in outcomes),
        outcomes=tuple(outcomes),
    )


def check_figure(figure: Figure, option: str, most: float, name: str) -> GateResult:
    """Check one figure of another record than a report. `option`: of its maximum; `name`: of the file."""
    met, detail = decide(figure, "<=", most)
    outcome = Outcome(check=with_flags(f"`{option}={most}`"), met=met, detail=detail)
    return GateResult(report=name, baseline=None, passed=met, outcomes=(outcome,))


def _validity(report: Report, name: str) -> Iterator[Outcome]:
    """A failed result if the run failed, or if the report is inconsistent or has no nodes."""
    if not any(map(is_known, report.phases)):
        yield Outcome(check="report", met=False, detail=f"no phase of {name} has a node, so nothing can be confirmed")
    if (reason := failure_of(report)) is not None:
        detail = f"the run of {name} failed, so nothing can be confirmed: {reason}"
        yield Outcome(check="report", met=False, detail=detail)
    failed = [f"{entry.name} ({entry.detail})" for entry in report.checks if not entry.passed]
    if failed:
        yield Outcome(check="report", met=False, detail=f"{name} is inconsistent: {'; '.join(failed)}")


# Baseline


def _compare(report: Report, gate: Gate, name: str, other: str, baseline: Report) -> Iterator[Outcome]:
    """The outcome of each section that is compared with a baseline. Raises ReportError for another model."""
    found = compare(baseline, report, names=(other, name))
    if found.unrelated_reason:
        raise ReportError(
            f"{other} cannot be a baseline for {name}: {found.unrelated_reason}; give a report of the same model"
        )
    failed = failure_of(report) is not None
    if gate.max_slowdown is not None:
        option = with_flags(f"`max_slowdown={gate.max_slowdown}`")
        slowdown, text = (None, "the run failed") if failed else _slowdown(report, baseline)
        detail = text if slowdown is not None else f"cannot be confirmed: {text}"
        yield Outcome(check=option, met=slowdown is not None and slowdown <= gate.max_slowdown, detail=detail)
    for section, label in BASELINE.items():
        worse = [change for change in found.of(section) if change.effect == "worse"]
        detail = _describe(worse, found) if worse else "not worse than the baseline"
        detail = "cannot be confirmed: the run failed" if failed else detail
        yield Outcome(check=f"{with_flags('`baseline`')}: {label}", met=not (worse or failed), detail=detail)


def _describe(changes: list[Change], found: Comparison) -> str:
    """Changes for the worse: `1 node: a/MatMul (prefill and decode: CUDA -> CPU: no_kernel_type)`."""
    same = grouped(changes, lambda change: (display_name(change), describe(change)))
    texts = [f"{name} ({listing(change.group for change in group)}: {text})" for (name, text), group in same.items()]
    count = f"{plural(count_names(changes), 'node')}: " if changes[0].section in ("nodes", "reasons") else ""
    new = [change for change in found.of("copies") if changes[0].section == "copy_count" and change.kind == "added"]
    more = f"; new: {name_some(dict.fromkeys(change.name for change in new))}" if new else ""
    return f"{count}{name_some(texts)}{more}"


def _slowdown(report: Report, baseline: Report) -> tuple[float | None, str]:
    """Relative increase of the time per token (0.1 is 10 % more) with its text, or None with why it is unknown."""
    was, now = repeated_phase(baseline.phases), repeated_phase(report.phases)
    if baseline.environment.cpu != report.environment.cpu:
        return None, "the runs were on different processors"
    if was.name != now.name:
        return None, f"{now.name} here, {was.name} in the baseline"
    if None not in (was.profiled, now.profiled) and was.profiled is not now.profiled:
        which = "here" if now.profiled else "in the baseline"
        return None, f"every step of {now.name} was profiled {which}, which slows it down; generate more tokens there"
    before, after = _active_rows(baseline, was), _active_rows(report, now)
    if before is not None and after is not None and max(before, after) > SAME_ROWS * min(before, after):
        return None, f"{decimals(after)} active rows per step here, {decimals(before)} in the baseline"
    if not was.tokens_per_second or not now.tokens_per_second:
        return None, "one of the reports has no speed"
    ratio = was.tokens_per_second / now.tokens_per_second
    speeds = f"{decimals(now.tokens_per_second)} tokens/s, {decimals(was.tokens_per_second)} in the baseline"
    return round(ratio - 1, 12), f"{speeds}: {decimals(ratio)} times the time per token"


def _active_rows(report: Report, phase: Phase) -> float | None:
    """Mean number of active rows in timed decode steps, without accepted draft tokens; None without timed steps."""
    if phase.name != "decode":
        return None
    drafts = report.speculation
    tokens, steps = (phase.tokens, phase.steps) if drafts is None else (rows_of(drafts), drafts.steps)
    return tokens / steps if tokens and steps else None


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
    return Document(
        kind="Check of a report",
        name=result.report,
        headline=(headline(result),),
        sections=(section,) if rows else (),
    )


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
