"""Shortened sections for views without folding: the first entries and the number of others."""

from __future__ import annotations

from collections.abc import Sequence

from partita.observations.text_format import plural
from partita.partition_reports.sections.model import Block, Fold, Group, Line, Row, Table

FINDINGS = 2
"""Maximum shown groups without a title, such as evidence of one reason."""
LEFT_OUT = frozenset({"nodes"})
"""Sections that would be empty without their folds."""


def shown_blocks(blocks: Sequence[Block], hint: str = "") -> list[Block]:
    """Blocks without folds, and with the first untitled groups only, followed by the number of others.

    `hint`: suffix of that line with the views that show them.
    """
    findings = [block for block in blocks if isinstance(block, Group) and not block.title]
    more = f"and {plural(len(findings) - FINDINGS, 'more group')} of nodes with other evidence{hint}"
    shown: list[Block] = []
    for block in blocks:
        if block in findings[FINDINGS:]:
            shown += [Line(more, tone="quiet")] if block is findings[FINDINGS] else []
        elif not isinstance(block, Fold):
            shown.append(block)
    return shown


def shown_rows(table: Table) -> tuple[tuple[Row, ...], str]:
    """The first rows of a table and a summary of the others; all rows if the table has no summary."""
    if table.summarise_rest is None or len(table.rows) <= table.maximum_rows:
        return table.rows, ""
    return table.rows[: table.maximum_rows], table.summarise_rest(table.maximum_rows)
