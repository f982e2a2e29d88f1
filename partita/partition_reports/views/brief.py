"""The report in at most ten lines."""

from __future__ import annotations

from rich.console import Console
from rich.style import Style

from partita.partition_reports.records import Report
from partita.partition_reports.render import layout
from partita.partition_reports.render.blocks import INDENT, TONES
from partita.partition_reports.render.terminal import ALARM, BOLD, PLAIN, Page, terminal_view
from partita.partition_reports.sections.brief import MOST_LINES, brief
from partita.partition_reports.sections.glance import find_state


def render(report: Report, console: Console) -> None:
    """Print the lines, wrapped if that gives at most ten lines."""
    page, lines = Page(console), brief(report)
    tone = TONES[find_state(report).tone]
    needed = sum(len(layout.paragraph(_line_text(page, *line), console.width, hang=INDENT)) for line in lines)
    for number, (label, text) in enumerate(lines):
        style = BOLD + Style(color=tone.color) if number == 0 else ALARM if label == "note" else PLAIN
        if needed > MOST_LINES:
            page.put(_line_text(page, label, text), style, bold=len(label) + 1 if label else 0)
        else:
            page.line(text, indent=0, hang=INDENT, label=label, style=style)


def _line_text(page: Page, label: str, text: str) -> str:
    """One sanitised line with its label."""
    return page.harmless(f"{label}: {text}" if label else text)


VIEW = terminal_view("brief", "the report in at most ten lines", render)
