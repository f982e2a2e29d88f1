"""Labelled lines of a brief report: outcome, placement, reason, nodes, cost, remedy, copies, cache, speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.diagnosis.records import Fallback
from partita.observations.text_format import in_phases, name_some, plural, short_provider
from partita.partition_reports.outcome import active_of, counted_rows, key_of, main_phase, preferred_of
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.sections.fallbacks import GroupKey, by_reason, cost_text, count_text, reason_text
from partita.partition_reports.sections.model import Command, text_of
from partita.partition_reports.sections.overview import Overview, find_flags, glance
from partita.partition_reports.sections.shared import count_and_bytes, placements, speed_text, subgraph_suffix
from partita.partition_reports.verdict import cache_text, placement_text

NAMED = 1
"""Maximum named families of nodes, for one line."""
MOST_PLACEMENTS = 2
"""prefill and decode may have different placements."""


def brief(report: Report) -> list[tuple[str, str]]:
    """Labels and sentences in order of display; the first has no label."""
    top = glance(report)
    lines = [("", f"{top.name}: {top.state.headline}")]
    flags = "; ".join(f"{flag.label}: {flag.short or flag.text}" for flag in find_flags(report))
    lines += [("note", flags)] if flags else []
    lines += [*placement_line(report), *reason_line(report), *_action_text(top)]
    lines += [("copies", _copies(main))] if (main := main_phase(report)) else []
    if report.cache is not None and report.cache.states:
        lines.append(("cache", cache_text(report.cache)))
    return [*lines, *(("speed", speed) for speed in _speed(report))]


def placement_line(report: Report) -> Iterator[tuple[str, str]]:
    """Nodes per provider, of each placement; with phases if they differ."""
    found = placements(report)[:MOST_PLACEMENTS]
    for phases in found:
        placed = placement_text(phases, preferred_of(report), short_provider)
        same = in_phases(phase.name for phase in phases) if len(found) == 1 else ""
        yield "where", placed.removesuffix(same)


def reason_line(report: Report) -> Iterator[tuple[str, str]]:
    """An unavailable provider, then the reason with the highest cost, its nodes, and the number of other reasons."""
    missing = [entry for entry in report.chain if entry.status == "unavailable"]
    texts = []
    if missing:
        why = f"{missing[0].reason or 'no reason known'}: {missing[0].evidence or 'no evidence'}"
        texts.append(f"{short_provider(missing[0].provider)} is unavailable: {why}")
    groups = by_reason(report)
    if missing:  # covered above
        groups = [group for group in groups if group[1][0].preferred_provider in active_of(report)]
    if groups:
        texts.append(_render_reason(report, groups))
    if texts:
        yield "fallbacks", "; ".join(texts)
    if groups:
        entries, rows = groups[0][1], counted_rows(report)
        names = [name for entry in entries for name in rows[key_of(entry)]] or [entry.node for entry in entries]
        yield "nodes", name_some(dict.fromkeys(names), NAMED)
        yield from _cost(report, entries)


def _render_reason(report: Report, groups: Sequence[tuple[GroupKey, Sequence[Fallback]]]) -> str:
    """The first reason with the number of its nodes, and the number of other reasons."""
    (reason, provider), entries = groups[0]
    nodes = count_text(report, entries)
    others = f"; and {plural(len(groups) - 1, 'more reason')}" if len(groups) > 1 else ""
    return f"{nodes} on {short_provider(provider)}: {reason_text(reason, entries)} ({reason}){others}"


def _cost(report: Report, entries: Sequence[Fallback]) -> Iterator[tuple[str, str]]:
    """Cost of the nodes in their last phase."""
    last = entries[-1].phase
    costs = [entry.cost for entry in entries if entry.cost is not None and entry.phase == last]
    for phase in report.phases:
        if costs and phase.name == last:
            yield "cost", cost_text(costs, phase)


def _action_text(top: Overview) -> Iterator[tuple[str, str]]:
    """A command with its description, or else the remedy."""
    first = top.questions[-1].lines[0]
    if top.state.name not in ("all", "nearly"):
        about = f" ({first.does})" if isinstance(first, Command) and first.does else ""
        yield "remedy", f"{first.text}{about}" if isinstance(first, Command) else text_of(first)


def _copies(phase: Phase) -> str:
    """Copies and partitions of one run."""
    cost, parts = phase.cost, plural(len(phase.partitions), "partition")
    where = "" if phase.name == "run" else f" of {phase.name}"
    inside = subgraph_suffix(phase)
    if cost is None:
        return f"{len(phase.copies):,}{inside}; {parts}"
    counted = count_and_bytes(cost.copies, cost.copy_bytes_per_run, cost.copy_bytes_at_least)
    return f"{counted} per run{where}{inside}; {parts}"


def _speed(report: Report) -> Iterator[str]:
    """Tokens per second, or time per run, of every phase, decode first."""
    speeds = [(*speed_text(phase), in_phases([phase.name])) for phase in reversed(report.phases)]
    known = [f"{speed}{where} ({of})" for speed, *basis, where in speeds if speed for of in basis]
    if known:
        yield ", ".join(known)
