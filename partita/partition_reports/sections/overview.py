"""The top of a report, equal in every view: outcome, warnings, reason, cost, remedy, placement, copies and speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.diagnosis.records import Fallback
from partita.observations.records import ChainEntry
from partita.observations.text_format import decimals, in_phases, listing, name_some, plural, short_provider
from partita.partition_reports.outcome import (
    TOO_FEW,
    StateName,
    active_of,
    cache_text,
    counted_rows,
    failure_of,
    is_default_without_first,
    key_of,
    main_phase,
    placement_text,
    preferred_of,
    state_name,
    too_few_steps,
    was_interrupted,
)
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.sections.fallbacks import (
    GroupKey,
    by_reason,
    cost_line,
    count_text,
    reason_anchor,
    reason_text,
    slow_groups,
    slow_text,
    top_actions,
)
from partita.partition_reports.sections.model import Block, Command, Line, Tone
from partita.partition_reports.sections.phases import copies_text
from partita.partition_reports.sections.placement import placements
from partita.remedies import shell

SIGNS: dict[StateName, tuple[str, Tone]] = {
    "all": ("✓", "good"),
    "nearly": ("◕", "mild"),
    "partly": ("◐", "warn"),
    "none": ("✕", "bad"),
    "refused": ("⊘", "bad"),
    "empty": ("○", "good"),
    "nothing": ("–", "bad"),
    "failed": ("✕", "bad"),
}
"""A symbol for each state, and its tone."""
NAMED_CHECKS = 3
"""Maximum failed checks named at the top."""
MOST_PLACEMENTS = 2
"""prefill and decode may have different placements."""


def model_name(report: Report) -> str:
    """Name of the package or file."""
    if report.package is not None:
        return report.package.name
    return report.model.file if report.model is not None else "unknown model"


def sign_and_tone(report: Report) -> tuple[str, Tone]:
    """Symbol and tone of the outcome."""
    return SIGNS["partly" if is_default_without_first(report) and state_name(report) == "none" else state_name(report)]


def opening(report: Report) -> Iterator[Block]:
    """Warnings, the first reason with its cost and remedy, then placement, copies, cache and speed."""
    yield from _warnings(report)
    yield from _reason(report)
    yield from remedies(report)
    slow, main, speeds = slow_groups(report), main_phase(report), list(filter(None, map(_speed, report.phases[::-1])))
    if slow:
        yield Line(f"{slow_text(slow[0])}{_more(slow, 'path')}", "slow")
    for phases in placements(report)[:MOST_PLACEMENTS]:
        yield Line(placement_text(phases, preferred_of(report), short_provider), "placement")
    rows = counted_rows(report)
    for _, entries in _groups(report)[:1]:
        names = [name for entry in entries for name in rows[key_of(entry)]] or [entry.node for entry in entries]
        yield Line(name_some(dict.fromkeys(names), 1), "nodes")
    if main is not None:
        yield Line(copies_text(main), "copies")
    if report.cache is not None and report.cache.states:
        yield Line(cache_text(report.cache), "cache")
    if speeds:
        yield Line(", ".join(speeds), "speed")


def _more(groups: Sequence[object], noun: str) -> str:
    """Suffix with the number of groups after the first."""
    return f"; and {plural(len(groups) - 1, f'more {noun}')}" if len(groups) > 1 else ""


def _speed(phase: Phase) -> str:
    """The speed of a phase and its basis; empty if unknown."""
    few = f"; {TOO_FEW}" if too_few_steps(phase) else ""
    steps, where = plural(phase.steps, "run" if phase.name == "run" else f"{phase.name} step"), in_phases([phase.name])
    median = f"{decimals(phase.step_p50_ms)} ms"
    if phase.tokens_per_second is None:
        of = f"median of {steps}" if phase.steps > 1 else steps
        return "" if phase.step_p50_ms is None else f"{median} per run{where} ({of}{few})"
    if phase.steps > 1 and phase.step_p50_ms is not None:
        steps = f"mean of {steps}; median step {median}"
    return f"{decimals(phase.tokens_per_second)} tokens/s{where} ({steps}{few})"


def _warnings(report: Report) -> Iterator[Line]:
    """Limits of the trust in the report."""
    device = report.dry_run
    if device is not None:
        yield Line(f"as {device.device_name}: no device was used, and there are no times", "dry run", "bad")
    if report.package is not None and report.package.verification != "verified":
        yield Line(report.package.verification_detail, "unverified package", "bad")
    for sentence in report.exceeded_limits:
        yield Line(sentence, "limit exceeded", "bad")
    failed = [check.name for check in report.checks if not check.passed]
    if failed:
        more = [f"{len(failed) - NAMED_CHECKS} more"] if len(failed) > NAMED_CHECKS else []
        label = f"{plural(len(failed), 'check')} of this report failed"
        yield Line(listing([*failed[:NAMED_CHECKS], *more]), label, "bad")
    if report.conflicts:
        nodes = len({entry.node for entry in report.conflicts})
        yield Line(f"for {plural(nodes, 'node')}", "conflicting sources", "bad")
    if was_interrupted(report):
        yield Line("interrupted", "the run ended early", "bad")


def _unavailable(report: Report) -> list[ChainEntry]:
    """Unavailable providers of the chain."""
    return [entry for entry in report.chain if entry.status == "unavailable"]


def _groups(report: Report) -> list[tuple[GroupKey, list[Fallback]]]:
    """Fallbacks by reason, except the reasons of an unavailable provider."""
    groups, active = by_reason(report), active_of(report)
    return [each for each in groups if each[1][0].preferred_provider in active] if _unavailable(report) else groups


def _reason(report: Report) -> Iterator[Line]:
    """An unavailable provider, then the reason with the highest cost, its cost, and the number of other reasons."""
    texts = [
        f"{short_provider(entry.provider)} is unavailable: {entry.reason or 'no reason known'}: "
        f"{entry.evidence or 'no evidence'}"
        for entry in _unavailable(report)[:1]
    ]
    groups = _groups(report)
    if not groups:
        yield from (Line(text, "fallbacks") for text in texts)
        return
    (reason, provider), entries = groups[0]
    nodes = f"{count_text(report, entries)} on {short_provider(provider)}"
    texts.append(f"{nodes}: {reason_text(reason, entries)} ({reason}){_more(groups, 'reason')}")
    yield Line("; ".join(texts), "fallbacks", target=reason_anchor(by_reason(report).index(groups[0])))
    cost = cost_line(report, entries)
    if cost is not None:
        yield Line(cost.text, "cost")


def remedies(report: Report) -> Iterator[Line | Command]:
    """The remedies of unavailable providers, and of the first reason with its command."""
    if (failed := failure_of(report)) is not None:  # an error message ends with its remedy
        yield Line(failed.rpartition("; ")[2], "remedy", "good")
        return
    missing, state = _unavailable(report), state_name(report)
    if not missing and state in ("all", "nearly", "empty"):
        for first, *_ in slow_groups(report)[:1]:
            yield Line(f"{first.cause}: {first.remedy}", "remedy", "good")
        return
    for entry in missing:
        for remedy in entry.remedies:
            words = shell(remedy.options)
            yield Line(f"{remedy.text}{': ' if words else ''}{words}", "remedy", "good")
            yield from [Command(remedy.command)] if remedy.command else []
        if entry.remedy and not entry.remedies:
            yield Line(entry.remedy, "remedy", "good")
    action = next(top_actions(report, by_reason(report)), None)
    # With an unavailable provider, also show the remedy for an available one.
    reasons = _groups(report)
    if reasons and (action is None or missing):
        yield Line(reasons[0][1][0].remedy, "remedy", "good")
    if action is not None:
        yield from () if missing else (Line(action.title, "remedy", "good"),)
        yield Command(action.remedy.command, action.remedy.text)
    elif not missing and not reasons:
        yield Line("No remedy is known.", "remedy")
