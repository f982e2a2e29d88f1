"""How wide the columns of a table have to be to be read, from what is in them."""

from __future__ import annotations

from dataclasses import dataclass

from partita.partition_reports.sections.model import Table, text_of

LONG = 28
"""Characters from which a text wants a wide column."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A table for the page."""

    css: tuple[str, ...]
    """Class of each column: n for numbers, w for long texts, empty for short ones."""
    stacks: bool
    """On a narrow screen every row becomes a block: there is a long text beside the one that names the row."""


def shape_of(table: Table) -> Shape:
    """The classes of the columns, by the longest text in each."""
    longest = [max((len(text_of(row.cells[at])) for row in table.rows), default=0) for at in range(len(table.columns))]
    css = tuple(
        "n" if column.number else "w" if length > LONG else ""
        for column, length in zip(table.columns, longest, strict=True)
    )
    return Shape(css, any(kind == "w" for at, kind in enumerate(css) if at != table.name))
