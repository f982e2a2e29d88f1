"""Whether a report meets what was asked of it, for CI: limits, requirements, and a baseline to keep up with. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import Field

from partita.errors import ReportError
from partita.observations.records import Record
from partita.observations.text_format import decimals, human_bytes, listing, name_some, plural
from partita.partition_reports.check.limits import (
    BYTES,
    COPIES,
    NODES,
    Limits,
    cpu_nodes,
    exceeded,
    repeated_phase,
)
from partita.partition_reports.check.requirements import Requirement, find
from partita.partition_reports.diff.compare import compare
from partita.partition_reports.diff.headline import provider
from partita.partition_reports.diff.records import CopyChange, ReportDiff
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.verdict import describe_cache

UNEXPLAINED, CACHE, SPEED = "--max-unexplained", "--require-cache-in-place", "--min-tokens-per-second"
BASELINE, SLOWDOWN = "--baseline", "--max-slowdown"


@dataclass(frozen=True, slots=True)
class Gate:
    """What is asked of a report. None: not asked."""

    limits: Limits = Limits()
    max_unexplained: int | None = None
    """Nodes without a reason, in the phase that has most of them."""
    cache_in_place: bool = False
    min_tokens_per_second: float | None = None
    """In decode, or in the only phase."""
    requirements: tuple[Requirement, ...] = ()
    max_slowdown: float | None = None
    """Of the baseline's time per token: 0.1 allows 10 % more."""


class Outcome(Record):
    """One thing that was asked for."""

    check: str
    """As it was written."""
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


def check(report: Report, gate: Gate, name: str, baseline: tuple[str, Report] | None = None) -> GateResult:
    """Hold a report against a gate. `name` and the first of `baseline`: what to call the two.

    Raises ReportError when the baseline is of another model: nothing can be said then.
    """
    outcomes = [*sound(report)]
    if any(phase.nodes for phase in report.phases):
        outcomes += [*within_limits(report, gate), *as_required(report, gate)]
        if baseline is not None:
            outcomes += not_behind(report, baseline[1], gate, (baseline[0], name))
    return GateResult(
        report=name,
        baseline=baseline[0] if baseline else None,
        passed=all(outcome.holds for outcome in outcomes),
        outcomes=tuple(outcomes),
    )


def sound(report: Report) -> Iterator[Outcome]:
    """A report that does not add up proves nothing, nor does one without a node."""
    if not any(phase.nodes for phase in report.phases):
        yield Outcome(check="report", holds=False, detail="no phase has a node, so nothing can be confirmed")
    failed = [f"{entry.name} ({entry.detail})" for entry in report.checks if not entry.passed]
    if failed:
        yield Outcome(check="report", holds=False, detail=f"it does not add up: {'; '.join(failed)}")


def within_limits(report: Report, gate: Gate) -> Iterator[Outcome]:
    """The limits that `place` and `generate` take, too, with the same words when one is not met."""
    phases = [phase for phase in report.phases if phase.nodes]
    for option, value in gate.limits.given().items():
        single = {NODES: Limits(value), COPIES: Limits(None, value), BYTES: Limits(None, None, value)}[option]
        over = exceeded(phases, single)
        written = f"{option} {value}"
        detail = over[0].removeprefix(f"{written}: ") if over else say_within(option, phases)
        yield Outcome(check=written, holds=not over, detail=detail)


def say_within(option: str, phases: list[Phase]) -> str:
    """The figure of a limit that is met."""
    phase = repeated_phase(phases)
    if option == NODES:
        return f"at most {max(len(cpu_nodes(entry)) for entry in phases)} in a phase"
    if option == COPIES:
        return f"{sum(copy.kind == 'memcpy_node' for copy in phase.copies)} in {phase.name}"
    return f"{sum(copy.bytes_per_run or 0 for copy in phase.copies):,} in {phase.name}"


def as_required(report: Report, gate: Gate) -> Iterator[Outcome]:
    """Everything else that is about this report alone."""
    if gate.max_unexplained is not None:
        yield few_unexplained(report, gate.max_unexplained)
    if gate.cache_in_place:
        yield cache_in_place(report)
    if gate.min_tokens_per_second is not None:
        yield fast_enough(report, gate.min_tokens_per_second)
    for requirement in gate.requirements:
        findings = find(requirement, report)
        bad = [text for holds, text in findings if not holds]
        yield Outcome(
            check=f"--require {requirement.text}",
            holds=not bad,
            detail="; ".join(bad or (text for _, text in findings)),
        )


def few_unexplained(report: Report, most: int) -> Outcome:
    """Nodes off the wanted provider for which no reason was found."""
    per_phase: dict[str, list[str]] = {}
    for entry in report.fallbacks:
        if entry.reason == "unexplained":
            per_phase.setdefault(entry.phase, []).append(f"{entry.node} ({entry.op_type or 'unknown'})")
    phase, nodes = max(reversed(per_phase.items()), key=lambda item: len(item[1]), default=("all phases", []))
    held = len(nodes) <= most
    detail = f"{len(nodes)} in {phase}" if held else f"{plural(len(nodes), 'node')} in {phase}: {name_some(nodes)}"
    return Outcome(check=f"{UNEXPLAINED} {most}", holds=held, detail=detail)


def cache_in_place(report: Report) -> Outcome:
    """Past and present of every state were one buffer, and somebody looked."""
    cache = report.cache
    if cache is None or not cache.states:
        return Outcome(check=CACHE, holds=False, detail="cannot be confirmed: the report knows no cache")
    moved = [entry.name for entry in cache.entries if not entry.in_place]
    held = cache.checked_steps != 0 and cache.in_place_states == cache.states and not cache.address_changes
    named = f": {name_some(moved)}" if moved else ""
    return Outcome(check=CACHE, holds=held, detail=f"{describe_cache(cache)}{named}")


def fast_enough(report: Report, least: float) -> Outcome:
    """Speed of the phase that is run for every token."""
    phase = repeated_phase(report.phases)
    speed = phase.tokens_per_second
    written = f"{SPEED} {least:g}"
    if speed is None:
        why = "a dry run has no times" if report.dry_run is not None else f"the report has none for {phase.name}"
        return Outcome(check=written, holds=False, detail=f"cannot be confirmed: {why}")
    return Outcome(check=written, holds=speed >= least, detail=f"{decimals(speed)} tokens/s in {phase.name}")


def not_behind(report: Report, baseline: Report, gate: Gate, names: tuple[str, str]) -> Iterator[Outcome]:
    """What may not be worse than in the baseline: placement, reasons, copies, the cache, and speed if asked for."""
    diff = compare(baseline, report, names=names)
    if diff.unrelated:
        raise ReportError(
            f"{names[0]} is no baseline for {names[1]}: {diff.unrelated}; give a report of the same model"
        )
    wanted = tuple(entry.chain[0].provider if entry.chain else "nothing" for entry in (baseline, report))
    if wanted[0] != wanted[1]:
        detail = f"{wanted[1]} is wanted here, {wanted[0]} in the baseline"
        yield Outcome(check=f"{BASELINE}: wanted provider", holds=False, detail=detail)
    yield same_phases(baseline, report)
    if wanted[0] == wanted[1]:
        yield none_moved_away(diff, wanted[0])
    yield no_new_reasons(diff)
    yield from no_more_copies(diff)
    if baseline.cache is not None and baseline.cache.states and cache_in_place(baseline).holds:
        now = cache_in_place(report)
        yield Outcome(check=f"{BASELINE}: cache", holds=now.holds, detail=now.detail)
    if gate.max_slowdown is not None:
        yield not_slower(baseline, report, gate.max_slowdown)


def same_phases(baseline: Report, report: Report) -> Outcome:
    """Every phase of the baseline was run."""
    lost = [phase.name for phase in baseline.phases if phase.name not in {entry.name for entry in report.phases}]
    detail = f"{listing(lost)} only in the baseline" if lost else "the same"
    return Outcome(check=f"{BASELINE}: phases", holds=not lost, detail=detail)


def none_moved_away(diff: ReportDiff, wanted: str) -> Outcome:
    """No node left the wanted provider."""
    left = [change for change in diff.moved if change.before == wanted]
    named = per_node(
        (change.phase, change.node, f"to {provider(change.after)}{f': {change.reason}' if change.reason else ''}")
        for change in left
    )
    detail = f"{plural(len(named), 'node')} left {wanted}: {name_some(named)}" if left else f"none left {wanted}"
    return Outcome(check=f"{BASELINE}: nodes", holds=not left, detail=detail)


def no_new_reasons(diff: ReportDiff) -> Outcome:
    """No node is off the wanted provider that was on it, or was not there. Another reason for a node is no worse."""
    new = per_node((change.phase, change.node, change.after or "") for change in diff.reasons if change.change == "new")
    detail = f"{plural(len(new), 'node')} with a new reason: {name_some(new)}" if new else "no new one"
    return Outcome(check=f"{BASELINE}: reasons", holds=not new, detail=detail)


def per_node(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """Phase, node and what is said of it -> one text for each node, `node (prefill and decode: what)`."""
    alike: dict[tuple[str, str], list[str]] = {}
    for phase, node, said in found:
        alike.setdefault((node, said), []).append(phase)
    return [f"{node} ({listing(phases)}: {said})" for (node, said), phases in alike.items()]


def no_more_copies(diff: ReportDiff) -> Iterator[Outcome]:
    """Neither more copies nor more bytes, in any phase."""
    more: dict[tuple[str, str], list[str]] = {}
    larger, same = [], []
    for figure in diff.figures:
        was, now = figure.before, figure.after
        if figure.name == "copies" and was is not None and now is not None and now > was:
            new = [
                say_copy(change) for change in diff.copies if change.phase == figure.phase and change.change == "new"
            ]
            more.setdefault((f"{now:,.0f}", f"{was:,.0f} in the baseline: {name_some(new)}"), []).append(figure.phase)
        elif figure.name == "copies":
            same.append(f"{now or 0:,.0f} in {figure.phase}")
        # Per run, not per token: runs with another number of tokens have no figure here, for they cannot be compared.
        if figure.name == "copy_bytes_per_run" and was is not None:
            if now is None:
                larger.append(f"cannot be confirmed in {figure.phase}: the size of a copy is not known")
            elif now > was:
                sizes = f"{human_bytes(round(now))}, {human_bytes(round(was))} in the baseline"
                larger.append(f"{sizes}, per run of {figure.phase}")
    detail = "; ".join([f"{now} in {listing(phases)}, {rest}" for (now, rest), phases in more.items()] or same)
    yield Outcome(check=f"{BASELINE}: copies", holds=not more, detail=detail)
    yield Outcome(
        check=f"{BASELINE}: bytes copied", holds=not larger, detail="; ".join(larger) or "no more where known"
    )


def say_copy(change: CopyChange) -> str:
    """A new copy."""
    return f"{change.what} ({change.direction.replace('_', ' ')})"


def not_slower(baseline: Report, report: Report, most: float) -> Outcome:
    """Time per token of the phase that is run for every token."""
    was, now = (repeated_phase(entry.phases).tokens_per_second for entry in (baseline, report))
    written = f"{SLOWDOWN} {most:g}"
    if not was or not now:
        return Outcome(check=written, holds=False, detail="cannot be confirmed: one of the reports has no speed")
    detail = (
        f"{decimals(now)} tokens/s, {decimals(was)} in the baseline: {decimals(was / now)} times the time per token"
    )
    return Outcome(check=written, holds=was / now <= 1 + most, detail=detail)
