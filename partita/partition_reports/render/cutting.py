"""What a view that cannot unfold anything shows of a section: the first of many, and how much is left."""

from __future__ import annotations

from collections.abc import Sequence

from partita.partition_reports.sections.model import Block, Fold, Group, Line, Row, Table

FINDINGS = 2
"""Groups without a title, such as pieces of evidence of one reason, that are shown below each other."""
LEFT_OUT = frozenset({"nodes"})
"""Sections of which nothing but the title would be left."""


def shown_blocks(blocks: Sequence[Block], elsewhere: str = "") -> list[Block]:
    """Blocks without those that are folded away, and of many untitled groups the first, with a line on the others.

    `elsewhere`: what that line says of where they are.
    """
    findings = [block for block in blocks if isinstance(block, Group) and not block.title]
    more = f"and {len(findings) - FINDINGS} more with other evidence{elsewhere}"
    shown: list[Block] = []
    for block in blocks:
        if block in findings[FINDINGS:]:
            shown += [Line(more, tone="quiet")] if block is findings[FINDINGS] else []
        elif not isinstance(block, Fold):
            shown.append(block)
    return shown


def shown_rows(table: Table) -> tuple[tuple[Row, ...], str]:
    """The first rows of a table, and what the others come to; empty when there are none. One that cannot say that is
    shown whole.
    """
    if table.rest is None or len(table.rows) <= table.most:
        return table.rows, ""
    return table.rows[: table.most], table.rest(table.most)
