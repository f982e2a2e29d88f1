"""The report in at most ten lines."""

from __future__ import annotations

from rich.console import Console
from rich.style import Style

from partita.partition_reports.records import Report
from partita.partition_reports.render.blocks import TONES
from partita.partition_reports.render.terminal import ALARM, BOLD, INDENT, PLAIN, Page, terminal_view
from partita.partition_reports.sections.brief import brief
from partita.partition_reports.sections.overview import find_state

MOST_LINES = 10
IMPORTANCE = ("", "fallbacks", "remedy", "note", "cost", "nodes", "where")
"""Labels in order of importance; other lines follow in order of display."""


def render(report: Report, console: Console) -> None:
    """Print the most important lines, as many as fit in ten lines of the console."""
    page = Page(console)
    headline = BOLD + Style(color=TONES[find_state(report).tone].color)
    styles = {"": headline, "note": ALARM}
    paragraphs = [
        (label, page.wrapped(text, hang=INDENT, label=label, style=styles.get(label, PLAIN)))
        for label, text in brief(report)
    ]
    left, shown = MOST_LINES, set()
    for number in sorted(range(len(paragraphs)), key=lambda number: _rank(paragraphs[number][0])):
        if len(paragraphs[number][1]) <= left:
            left -= len(paragraphs[number][1])
            shown.add(number)
    for number in sorted(shown):
        for line in paragraphs[number][1]:
            console.print(line, soft_wrap=True)


def _rank(label: str) -> int:
    return IMPORTANCE.index(label) if label in IMPORTANCE else len(IMPORTANCE)


VIEW = terminal_view("brief", "the report in at most ten lines", render)
