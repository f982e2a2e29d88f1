"""A bench for a terminal: the verdict first, then the figures, then where the time goes."""

from __future__ import annotations

from rich.console import Console

from partita.bench.records import Bench
from partita.bench.sections import sections
from partita.partition_reports.render.blocks import show_section
from partita.partition_reports.render.terminal import BOLD, Page, to_plain_text
from partita.partition_reports.views.base import View


def render(bench: Bench, console: Console, *, brief: bool = False) -> None:
    """Print a bench to `console`, at its width; readable at 80 columns without colour. `brief`: only the verdict."""
    page = Page(console)
    for sentence in bench.verdict:
        page.line(sentence, indent=0, style=BOLD)
    for section in () if brief else sections(bench):
        show_section(page, section)


def to_text(bench: Bench) -> str:
    """The same without colour, for a file."""
    return to_plain_text(lambda console: render(bench, console))


VIEW = View("bench", ".txt", "a bench as tables for a terminal", to_text, takes=("bench",))
