"""The verdict of a bench alone."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from partita.bench.records import Bench
from partita.bench.sections import document
from partita.partition_reports.render.blocks import show_document
from partita.partition_reports.render.terminal import Page, terminal_view


def render(bench: Bench, console: Console) -> None:
    """Print the verdict to `console`."""
    show_document(Page(console), replace(document(bench), sections=()))


VIEW = terminal_view("brief", "the verdict of a bench", render)
