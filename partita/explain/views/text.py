"""Everything a report knows about one node, for a terminal."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from partita.explain.document import document
from partita.explain.node_explanation import Explanation, Matches
from partita.partition_reports.render.blocks import show_document
from partita.partition_reports.render.terminal import Page, terminal_view


def render(found: Explanation | Matches, console: Console) -> None:
    """Print all about one node; of a name that fits several, the nodes alone: that it does is an error of its own."""
    made = document(found)
    show_document(Page(console), replace(made, headline=()) if isinstance(found, Matches) else made)


VIEW = terminal_view("text", "everything about one node", render)
