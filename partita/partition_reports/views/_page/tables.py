"""What the page's tables are made of. Text only: the template escapes it and makes it harmless."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Head:
    """A column: its title, and whether it holds numbers, which are set right."""

    title: str
    number: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """Text that leads to another place of the page."""

    text: str
    target: str
    """The id of the element there, without #."""


Cell = str | Link


@dataclass(frozen=True, slots=True)
class Row:
    """Cells in the order of the columns; `anchor` is the row's id when something leads to it."""

    cells: tuple[Cell, ...]
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its caption. The cell of column `name_column` is the heading of its row."""

    caption: str
    heads: tuple[Head, ...]
    rows: tuple[Row, ...]
    name_column: int = 0


def table(caption: str, heads: Iterable[Head | str], rows: Iterable[Row | tuple[Cell, ...]], name: int = 0) -> Table:
    """A table from titles and tuples of cells; a title that begins with # is that of a column of numbers."""
    columns = tuple(head if isinstance(head, Head) else Head(head.removeprefix("#"), head[:1] == "#") for head in heads)
    return Table(caption, columns, tuple(row if isinstance(row, Row) else Row(row) for row in rows), name)
