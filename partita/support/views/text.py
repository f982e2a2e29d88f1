"""A support table for a terminal: the answer first, then who was asked, then operator by operator."""

from __future__ import annotations

from rich.console import Console

from partita.partition_reports.render.blocks import show_section
from partita.partition_reports.render.terminal import BOLD, Page, terminal_view
from partita.support.records import SupportTable
from partita.support.sections import headline, sections


def render(found: SupportTable, console: Console) -> None:
    """Print a table to `console`, at its width; readable at 80 columns without colour."""
    page = Page(console)
    page.line(headline(found), indent=0, style=BOLD)
    for section in sections(found):
        show_section(page, section)


VIEW = terminal_view("text", "a support table for a terminal", render)
