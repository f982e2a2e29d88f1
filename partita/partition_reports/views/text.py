"""The report for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.style import Style

from partita.partition_reports.records import Report
from partita.partition_reports.render.blocks import TONES, show_command, show_section
from partita.partition_reports.render.terminal import ALARM, BOLD, DIM, INDENT, Page, terminal_view
from partita.partition_reports.sections.model import LEFT_OUT, Command, text_of
from partita.partition_reports.sections.overview import Overview, glance
from partita.partition_reports.sections.report import sections


def render(report: Report, console: Console) -> None:
    """Print the report to `console`, at its width."""
    page = Page(console)
    _show_top(page, glance(report))
    for section in sections(report):
        if section.key not in LEFT_OUT:
            show_section(page, section)


def _show_top(page: Page, top: Overview) -> None:
    """Print headline, verdict, warnings and actions."""
    for flag in top.flags:
        if not flag.in_verdict:
            page.line(f"{flag.label.upper()}: {flag.text}", indent=0, style=ALARM)
    page.line(top.verdict, indent=0, style=BOLD + Style(color=TONES[top.state.tone].color))
    sign = f"{top.state.sign} " if page.sanitised(top.state.sign) == top.state.sign else ""
    page.line(f"{sign}{top.state.headline}", indent=0, style=TONES[top.state.tone])
    page.line(f"{top.name}: {top.request}", indent=0, style=DIM)
    *_, action = top.questions
    if top.state.name in ("all", "nearly"):
        return
    page.line(action.figure, indent=0, label=action.question)
    for line in action.lines:
        if isinstance(line, Command):
            show_command(page, line, INDENT)
        else:
            page.line(text_of(line))


VIEW = terminal_view("text", "the report as tables for a terminal", render)
