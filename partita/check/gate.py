"""Checks a report against requirements and a baseline, for CI. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import Field

from partita.check.baseline import BaselineComparison, is_of_use
from partita.check.finding import find
from partita.check.limits import Limits
from partita.check.requirements import Requirement, short_form
from partita.observations.records import Record
from partita.partition_reports.outcome import failure_of, is_known
from partita.partition_reports.records import Report

BASELINE_MEASURES = {
    "wanted_other": "preferred provider",
    "lost_phases": "phases",
    "nodes_left": "nodes",
    "new_reasons": "reasons",
    "more_copies": "copies",
    "more_copy_bytes": "bytes copied",
    "lost_cache": "cache",
}
"""Measures that --baseline requires to be 0 unless a requirement sets them -> their name in the result."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Requirements of a report, and options that are short forms of requirements. None: no requirement."""

    limits: Limits = Limits()
    max_unexplained: int | None = None
    """Maximum number of nodes without a reason in a phase."""
    cache_in_place: bool = False
    min_tokens_per_second: float | None = None
    """Minimum speed of decode, or of the only phase."""
    requirements: tuple[Requirement, ...] = ()
    max_slowdown: float | None = None
    """Maximum increase of the baseline's time per token: 0.1 allows 10 % more."""

    def asked(self) -> tuple[Requirement, ...]:
        """All requirements, including the short forms."""
        found = [*self.limits.requirements()]
        if self.max_unexplained is not None:
            written = f"`max_unexplained={self.max_unexplained}`"
            found.append(short_form(written, "unexplained", "<=", self.max_unexplained))
        if self.cache_in_place:
            found.append(short_form("`cache_in_place=True`", "cache_in_place", "=", 1))
        if (least := self.min_tokens_per_second) is not None:
            found.append(short_form(f"`min_tokens_per_second={least}`", "decode_tokens_per_second", ">=", least))
        found += self.requirements
        if self.max_slowdown is not None:
            found.append(short_form(f"`max_slowdown={self.max_slowdown}`", "slowdown", "<=", self.max_slowdown))
        return tuple(found)


class Outcome(Record):
    """Result of one requirement."""

    check: str
    """The requirement as the user wrote it."""
    requirement: str = ""
    """The requirement in the syntax of --require; empty for checks of every report."""
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


def _from_baseline(asked: Sequence[Requirement], comparison: BaselineComparison) -> tuple[Requirement, ...]:
    """Requirements that follow from the baseline, without measures of explicit requirements."""
    own = {measure.field for requirement in asked for measure in requirement.measures}
    return tuple(
        short_form(f"`baseline`: {name}", field, "=", 0)
        for field, name in BASELINE_MEASURES.items()
        if field not in own and is_of_use(field, comparison)
    )


def check(report: Report, gate: Gate, name: str, baseline: tuple[str, Report] | None = None) -> GateResult:
    """Check a report. `name` and the first of `baseline`: names of the two reports.

    Raises ReportError for a baseline of another model, UsageError for a requirement that needs a missing baseline.
    """
    outcomes = [*_validity(report)]
    outcomes += [] if baseline is None else _inconsistencies(baseline[1], "the baseline")
    if any(is_known(phase) for phase in report.phases):
        comparison = None if baseline is None else BaselineComparison.of(report, baseline[1], (baseline[0], name))
        asked = gate.asked()
        asked = asked if comparison is None else (*asked, *_from_baseline(asked, comparison))
        outcomes += [_outcome(requirement, report, comparison) for requirement in asked]
    return GateResult(
        report=name,
        baseline=baseline[0] if baseline else None,
        passed=all(outcome.met for outcome in outcomes),
        outcomes=tuple(outcomes),
    )


def _validity(report: Report) -> Iterator[Outcome]:
    """A failed result if the report is inconsistent or has no nodes."""
    if not any(is_known(phase) for phase in report.phases):
        yield Outcome(check="report", met=False, detail="no phase has a node, so nothing can be confirmed")
    yield from _inconsistencies(report, "the report")


def _inconsistencies(report: Report, what: str) -> Iterator[Outcome]:
    """A failed result if the run failed or the report is inconsistent."""
    if (why := failure_of(report)) is not None:
        detail = f"the run of {what} failed, so nothing can be confirmed: {why}"
        yield Outcome(check="report", met=False, detail=detail)
    failed = [f"{entry.name} ({entry.detail})" for entry in report.checks if not entry.passed]
    if failed:
        yield Outcome(check="report", met=False, detail=f"{what} is inconsistent: {'; '.join(failed)}")


def _outcome(requirement: Requirement, report: Report, comparison: BaselineComparison | None) -> Outcome:
    """The result of one requirement."""
    findings = find(requirement, report, comparison)
    bad = [text for holds, text in findings if not holds]
    return Outcome(
        check=requirement.written,
        requirement=requirement.text,
        met=not bad,
        detail="; ".join(bad or [text for _, text in findings]),
    )
