"""The difference of two support tables, for a terminal."""

from __future__ import annotations

from rich.console import Console

from partita.observations.text_format import name_some
from partita.partition_reports.render.terminal import BOLD, Page
from partita.partition_reports.sections.model import words
from partita.support.diff import SupportDiff

MOST = 8
"""Variants that a cell names; --json names all."""


def render(found: SupportDiff, console: Console) -> None:
    """Print the difference to `console`, at its width."""
    page = Page(console)
    page.line(found.headline, indent=0, style=BOLD)
    page.heading("Tables")
    page.pairs(
        [
            (letter, f"{side.name}: {side.provider}, {side.onnxruntime}, {side.asked}, {side.created}")
            for letter, side in (("A", found.before), ("B", found.after))
        ]
    )
    if found.versions:
        page.heading("Versions and devices")
        page.table(
            (words("what"), words("A"), words("B")), [(each.name, each.before, each.after) for each in found.versions]
        )
    if found.changes:
        page.heading("Operators")
        heads = (words("operator"), words("no longer taken"), words("newly taken"))
        rows = [
            (
                f"{change.operator}-{change.since}",
                _some((*change.types_lost, *change.forms_lost)),
                _some((*change.types_gained, *change.forms_gained)),
            )
            for change in found.changes
        ]
        page.table(heads, rows)
    for name, listed in (("only in A", found.only_before), ("only in B", found.only_after)):
        if listed:
            page.line(name_some(listed), label=name)


def _some(variants: tuple[str, ...]) -> str:
    """The first variants, and how many more there are."""
    return "; ".join(variants[:MOST]) + (f"; and {len(variants) - MOST} more" if len(variants) > MOST else "")
