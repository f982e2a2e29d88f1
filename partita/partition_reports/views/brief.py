"""The report in at most ten lines: outcome, placement, reason, cost, remedy, slow paths, copies, cache, speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.style import Style

from partita.diagnosis.records import Fallback
from partita.observations.native_text import cut
from partita.observations.text_format import in_phases, name_some, plural, short_provider
from partita.partition_reports.outcome import (
    active_of,
    cache_text,
    counted_rows,
    key_of,
    main_phase,
    placement_text,
    preferred_of,
)
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.render.blocks import TONES
from partita.partition_reports.render.terminal import ALARM, BOLD, INDENT, PLAIN, Page, terminal_view
from partita.partition_reports.sections.fallbacks import GroupKey, by_reason, cost_text, count_text, reason_text
from partita.partition_reports.sections.kernels import slow_text
from partita.partition_reports.sections.model import Command, text_of
from partita.partition_reports.sections.overview import Overview, find_flags, find_state, glance
from partita.partition_reports.sections.shared import count_and_bytes, placements, speed_text, subgraph_suffix

MOST_LINES = 10
NAMED = 1
"""Maximum named families of nodes, for one line."""
MOST_PLACEMENTS = 2
"""prefill and decode may have different placements."""
ESSENTIAL = ("", "fallbacks", "remedy", "cost")
"""Labels of verdict, reason, remedy and cost, which every width shows, in order of importance."""
IMPORTANCE = (*ESSENTIAL, "note", "slow", "nodes", "where")
"""Labels in order of importance; other lines follow in order of display."""
LEAST_LINES = 2
"""Lines to which a long reason or verdict may be cut."""
CUT = 8
"""Characters removed at a time."""


class Sentence(NamedTuple):
    """A line of the brief before it is wrapped."""

    label: str
    text: str
    short: str = ""
    """Shorter text for a narrow console; empty without one."""


def render(report: Report, console: Console) -> None:
    """Print the most important lines, as many as fit in ten lines of the console."""
    page = Page(console)
    headline = BOLD + Style(color=TONES[find_state(report).tone].color)
    styles = {"": headline, "note": ALARM}
    paragraphs = [
        (each.label, page.wrapped(each.text, hang=INDENT, label=each.label, style=styles.get(each.label, PLAIN)))
        for each in _fitting(page, brief(report))
    ]
    left, shown = MOST_LINES, set()
    for number in sorted(range(len(paragraphs)), key=lambda number: _rank(paragraphs[number][0])):
        if len(paragraphs[number][1]) <= left:
            left -= len(paragraphs[number][1])
            shown.add(number)
    for number in sorted(shown):
        for line in paragraphs[number][1]:
            console.print(line, soft_wrap=True)


def _fitting(page: Page, sentences: Sequence[Sentence]) -> list[Sentence]:
    """The sentences, with shorter essential ones if these do not fit: short texts, then cuts in reason and verdict."""
    fitting = list(sentences)

    def count(*labels: str) -> int:
        return sum(len(page.wrapped(text, hang=INDENT, label=label)) for label, text, _ in fitting if label in labels)

    for number, (label, _, short) in enumerate(sentences):
        if short and label in ESSENTIAL and count(*ESSENTIAL) > MOST_LINES:
            fitting[number] = Sentence(label, short)
    for label in ("fallbacks", ""):
        for number, sentence in enumerate(sentences):
            longest = len(sentence.text)
            while sentence.label == label and count(*ESSENTIAL) > MOST_LINES and count(label) > LEAST_LINES:
                longest -= CUT
                fitting[number] = Sentence(label, cut(sentence.text, longest))
    return fitting


def _rank(label: str) -> int:
    return IMPORTANCE.index(label) if label in IMPORTANCE else len(IMPORTANCE)


def brief(report: Report) -> list[Sentence]:
    """Sentences in order of display; the first has no label."""
    top = glance(report)
    lines = [Sentence("", f"{top.name}: {top.state.headline}")]
    flags = "; ".join(f"{flag.label}: {flag.short or flag.text}" for flag in find_flags(report))
    lines += [Sentence("note", flags)] if flags else []
    lines += [*placement_line(report), *reason_line(report), *_action_text(top)]
    slow = slow_text(report)
    lines += [Sentence("slow", slow)] if slow else []
    lines += [Sentence("copies", _copies(main))] if (main := main_phase(report)) else []
    if report.cache is not None and report.cache.states:
        lines.append(Sentence("cache", cache_text(report.cache)))
    return [*lines, *(Sentence("speed", speed) for speed in _speed(report))]


def placement_line(report: Report) -> Iterator[Sentence]:
    """Nodes per provider, of each placement; with phases if they differ."""
    found = placements(report)[:MOST_PLACEMENTS]
    for phases in found:
        placed = placement_text(phases, preferred_of(report), short_provider)
        same = in_phases(phase.name for phase in phases) if len(found) == 1 else ""
        yield Sentence("where", placed.removesuffix(same))


def reason_line(report: Report) -> Iterator[Sentence]:
    """An unavailable provider, then the reason with the highest cost, its nodes, and the number of other reasons."""
    missing = [entry for entry in report.chain if entry.status == "unavailable"]
    texts = []
    if missing:
        reason = f"{missing[0].reason or 'no reason known'}: {missing[0].evidence or 'no evidence'}"
        texts.append(f"{short_provider(missing[0].provider)} is unavailable: {reason}")
    groups = by_reason(report)
    if missing:  # covered above
        groups = [group for group in groups if group[1][0].preferred_provider in active_of(report)]
    if groups:
        texts.append(_render_reason(report, groups))
    if texts:
        yield Sentence("fallbacks", "; ".join(texts))
    if groups:
        entries, rows = groups[0][1], counted_rows(report)
        names = [name for entry in entries for name in rows[key_of(entry)]] or [entry.node for entry in entries]
        yield Sentence("nodes", name_some(dict.fromkeys(names), NAMED))
        yield from _cost(report, entries)


def _render_reason(report: Report, groups: Sequence[tuple[GroupKey, Sequence[Fallback]]]) -> str:
    """The first reason with the number of its nodes, and the number of other reasons."""
    (reason, provider), entries = groups[0]
    nodes = count_text(report, entries)
    others = f"; and {plural(len(groups) - 1, 'more reason')}" if len(groups) > 1 else ""
    return f"{nodes} on {short_provider(provider)}: {reason_text(reason, entries)} ({reason}){others}"


def _cost(report: Report, entries: Sequence[Fallback]) -> Iterator[Sentence]:
    """Cost of the nodes in their last phase."""
    last = entries[-1].phase
    costs = [entry.cost for entry in entries if entry.cost is not None and entry.phase == last]
    for phase in report.phases:
        if costs and phase.name == last:
            text = cost_text(costs, phase)
            yield Sentence("cost", text, text.partition("; ")[0])


def _action_text(top: Overview) -> Iterator[Sentence]:
    """A command with its description, or else the remedy; in short the command, or the first clause."""
    first = top.questions[-1].lines[0]
    if top.state.name in ("all", "nearly"):
        return
    if isinstance(first, Command):
        yield Sentence("remedy", first.text + (f" ({first.does})" if first.does else ""), first.text)
    else:
        yield Sentence("remedy", text_of(first), text_of(first).partition("; ")[0])


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


VIEW = terminal_view("brief", "the report in at most ten lines", render)
