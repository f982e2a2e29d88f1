"""The verdict of a bench alone."""

from __future__ import annotations

from rich.console import Console

from partita.bench.records import Bench
from partita.bench.views.text import show_verdict
from partita.partition_reports.render.terminal import Page, terminal_view


def render(bench: Bench, console: Console) -> None:
    """Print the verdict to `console`."""
    show_verdict(Page(console), bench)


VIEW = terminal_view("brief", "the verdict of a bench", render)
