"""CSS classes of table columns, by the length of their texts."""

from __future__ import annotations

from dataclasses import dataclass

from partita.partition_reports.sections.model import Table, text_of

LONG = 28
"""Minimum characters of a text that needs a wide column."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Layout of a table in HTML."""

    css: tuple[str, ...]
    """Class of each column: n for numbers, w for long texts, empty for short ones."""
    stacks: bool
    """On a small screen every row becomes a block, because a column other than the first has long texts."""


def shape_of(table: Table) -> Shape:
    """The layout of a table, by the longest text in each column."""
    longest = [max((len(text_of(row.cells[at])) for row in table.rows), default=0) for at in range(len(table.columns))]
    css = tuple(
        "n" if column.number else "w" if length > LONG else ""
        for column, length in zip(table.columns, longest, strict=True)
    )
    return Shape(css, any(kind == "w" for at, kind in enumerate(css) if at != table.name))
