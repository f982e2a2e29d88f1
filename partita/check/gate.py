"""Whether a report meets what was asked of it, for CI: requirements, and a baseline to keep up with. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import Field

from partita.check.compared import Beside, is_of_use
from partita.check.finding import find
from partita.check.limits import Limits
from partita.check.requirements import Requirement, short_form
from partita.observations.records import Record
from partita.partition_reports.outcome import failure_of, is_known
from partita.partition_reports.records import Report

KEPT = {
    "wanted_other": "preferred provider",
    "lost_phases": "phases",
    "nodes_left": "nodes",
    "new_reasons": "reasons",
    "more_copies": "copies",
    "more_copy_bytes": "bytes copied",
    "lost_cache": "cache",
}
"""What --baseline asks for, none of each, where no requirement asks for it otherwise -> what that is called."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What is asked of a report: requirements, and options that are short forms of some. None: not asked."""

    limits: Limits = Limits()
    max_unexplained: int | None = None
    """Nodes without a reason, in the phase that has most of them."""
    cache_in_place: bool = False
    min_tokens_per_second: float | None = None
    """In decode, or in the only phase."""
    requirements: tuple[Requirement, ...] = ()
    max_slowdown: float | None = None
    """Of the baseline's time per token: 0.1 allows 10 % more."""

    def asked(self) -> tuple[Requirement, ...]:
        """All of it in the words of --require, with the names of the short forms."""
        asked = [*self.limits.requirements()]
        if self.max_unexplained is not None:
            written = f"`max_unexplained={self.max_unexplained}`"
            asked.append(short_form(written, "unexplained", "<=", self.max_unexplained))
        if self.cache_in_place:
            asked.append(short_form("`cache_in_place=True`", "cache_in_place", "=", 1))
        if (least := self.min_tokens_per_second) is not None:
            asked.append(short_form(f"`min_tokens_per_second={least}`", "decode_tokens_per_second", ">=", least))
        asked += self.requirements
        if self.max_slowdown is not None:
            asked.append(short_form(f"`max_slowdown={self.max_slowdown}`", "slowdown", "<=", self.max_slowdown))
        return tuple(asked)


class Outcome(Record):
    """One thing that was asked for."""

    check: str
    """As it was written."""
    requirement: str = ""
    """The same in the words of --require; empty for what is asked of every report."""
    holds: bool
    detail: str
    """With the figures, and the nodes when it does not hold."""


class GateResult(Record):
    """Everything that was asked for."""

    schema_id: str = Field(default="partita.check/1", alias="schema")
    report: str
    baseline: str | None
    passed: bool
    outcomes: tuple[Outcome, ...]


def _kept_up(asked: Sequence[Requirement], beside: Beside) -> tuple[Requirement, ...]:
    """What a baseline asks for, without that for which there is a requirement."""
    own = {measure.field for requirement in asked for measure in requirement.measures}
    return tuple(
        short_form(f"`baseline`: {name}", field, "=", 0)
        for field, name in KEPT.items()
        if field not in own and is_of_use(field, beside)
    )


def check(report: Report, gate: Gate, name: str, baseline: tuple[str, Report] | None = None) -> GateResult:
    """Hold a report against a gate. `name` and the first of `baseline`: what to call the two.

    Raises ReportError when the baseline is of another model: nothing can be said then. UsageError when something is
    asked that only a baseline tells, and there is none.
    """
    outcomes = [*_sound(report)]
    outcomes += [] if baseline is None else _adds_up(baseline[1], "the baseline")
    if any(is_known(phase) for phase in report.phases):
        beside = None if baseline is None else Beside.of(report, baseline[1], (baseline[0], name))
        asked = gate.asked()
        asked = asked if beside is None else (*asked, *_kept_up(asked, beside))
        outcomes += [_held(requirement, report, beside) for requirement in asked]
    return GateResult(
        report=name,
        baseline=baseline[0] if baseline else None,
        passed=all(outcome.holds for outcome in outcomes),
        outcomes=tuple(outcomes),
    )


def _sound(report: Report) -> Iterator[Outcome]:
    """A report that does not add up proves nothing, nor does one without a node."""
    if not any(is_known(phase) for phase in report.phases):
        yield Outcome(check="report", holds=False, detail="no phase has a node, so nothing can be confirmed")
    yield from _adds_up(report, "it")


def _adds_up(report: Report, what: str) -> Iterator[Outcome]:
    """That a run failed or a report does not add up, if so: what was not on a provider in it cannot have left one."""
    if (why := failure_of(report)) is not None:
        detail = f"{what} is of a run that failed, so nothing is confirmed: {why}"
        yield Outcome(check="report", holds=False, detail=detail)
    failed = [f"{entry.name} ({entry.detail})" for entry in report.checks if not entry.passed]
    if failed:
        yield Outcome(check="report", holds=False, detail=f"{what} does not add up: {'; '.join(failed)}")


def _held(requirement: Requirement, report: Report, beside: Beside | None) -> Outcome:
    """What came of one requirement."""
    findings = find(requirement, report, beside)
    bad = [said for holds, said in findings if not holds]
    return Outcome(
        check=requirement.written,
        requirement=requirement.text,
        holds=not bad,
        detail="; ".join(bad or [said for _, said in findings]),
    )
