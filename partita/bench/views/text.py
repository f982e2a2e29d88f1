"""A bench for a terminal: the verdict first, then the figures, then where the time goes."""

from __future__ import annotations

from rich.console import Console

from partita.bench.records import Bench
from partita.bench.sections import sections
from partita.bench.words import verdict_of
from partita.partition_reports.render.blocks import show_section
from partita.partition_reports.render.terminal import BOLD, Page, terminal_view


def render(bench: Bench, console: Console) -> None:
    """Print a bench to `console`, at its width; readable at 80 columns without colour."""
    page = Page(console)
    show_verdict(page, bench)
    for section in sections(bench):
        show_section(page, section)


def show_verdict(page: Page, bench: Bench) -> None:
    """The answer in sentences."""
    for sentence in verdict_of(bench):
        page.line(sentence, indent=0, style=BOLD)


VIEW = terminal_view("text", "a bench as tables for a terminal", render)
