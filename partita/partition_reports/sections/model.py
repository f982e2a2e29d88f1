"""Elements of a section: lines, pairs, tables, groups and folds. Texts are not escaped; views escape them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from partita.observations.text_format import decimals, human_bytes, name_some, plural
from partita.remedies import shell

BARS = "▁▂▃▄▅▆▇█"
Tone = Literal["plain", "quiet", "good", "mild", "warn", "bad"]
"""Meaning of a text; a view may show it as a colour, but not as a colour only."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. Numbers are right-aligned."""

    title: str
    number: bool = True
    group: str = ""
    """Adjacent columns of one group stay together."""


Head = Column | str
"""A column, or the title of a column of text."""


@dataclass(frozen=True, slots=True)
class Link:
    """Text with a link within the page, for views with links."""

    text: str
    target: str
    """Anchor of a row, a group or a section."""


Cell = str | Link


@dataclass(frozen=True, slots=True)
class Row:
    """Cells in the order of the columns. `anchor`: target of links."""

    cells: tuple[Cell, ...]
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Column `name` has the row headings."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    name: int = 0
    summarise_rest: Callable[[int], str] | None = None
    """Number of shown rows -> a sentence that summarises the others. None: views show all rows."""
    redundant_caption: bool = False
    """The caption repeats the headings and may be hidden."""
    maximum_rows: int = 12
    """Maximum shown rows in views that shorten tables."""


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence or paragraph with an optional label."""

    text: Cell
    label: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Command:
    """Unquoted words of a shell command, with a description."""

    arguments: tuple[str, ...]
    does: str = ""

    @property
    def text(self) -> str:
        """The command quoted for a shell."""
        return shell(self.arguments)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Names with one or more values."""

    caption: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Collapsible blocks; views without folding omit them."""

    title: str
    blocks: tuple[Block, ...]
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks under a heading, or related blocks without a title."""

    title: str
    blocks: tuple[Block, ...]
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """A named value of a plot; None: infinite."""

    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Plot:
    """Positive values in order, on a logarithmic axis, with a limit."""

    caption: str
    points: tuple[Point, ...]
    limit: float
    limit_name: str

    @property
    def heights(self) -> tuple[float, ...]:
        """Heights of the points from 0 to 1; a value of 0 is 0, an infinite one 1."""
        return tuple(self.height(point.value) for point in self.points)

    def height(self, value: float | None) -> float:
        """Height of a value."""
        low, high = self.ends
        return 1.0 if value is None else math.log(max(value / low, 1.0)) / math.log(high / low)

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the axis: a tenth of the smallest value that is not 0, and the largest value."""
        values = [value for value in (self.limit, *(point.value for point in self.points)) if value] or [1.0]
        return min(values) / 10, max(values)

    @property
    def line(self) -> str:
        """The heights as characters."""
        return "".join(BARS[min(int(height * len(BARS)), len(BARS) - 1)] for height in self.heights)


@dataclass(frozen=True, slots=True)
class Mark:
    """Mark of one provider in a map."""

    label: str
    """Short name."""
    css: str
    """CSS class of the colour."""
    letter: str
    """Its number, for readers who do not see the colour."""


@dataclass(frozen=True, slots=True)
class MapNode:
    """One node in a map."""

    css: str
    sign: str
    """Its text; empty for the small blocks of the provider with the most nodes."""
    title: str
    target: str
    """Id of the node's row in the list of nodes."""


@dataclass(frozen=True, slots=True)
class MapCell:
    """One layer in one phase."""

    nodes: tuple[MapNode, ...]
    summary: str
    fallbacks: str
    """Number of fallback nodes as text; empty for none."""
    fallback_operators: str
    """Fallback nodes by provider and operator, for screen readers."""


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Every node, by layer and phase; only pages show it."""

    caption: str
    introduction: str
    legend: tuple[Mark, ...]
    phases: tuple[str, ...]
    rows: tuple[tuple[str, tuple[MapCell, ...]], ...]
    """Title and cells of each layer."""
    fallbacks: int


Block = Line | Command | Pairs | Table | Fold | Group | Plot | LayerMap


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a document."""

    key: str
    """Identifier and anchor."""
    title: str
    blocks: tuple[Block, ...]
    about: str = ""
    """Suffix of the title, if there is room."""
    folded: bool = False
    """Collapsed in Markdown."""


@dataclass(frozen=True, slots=True)
class Document:
    """A record as headline and sections, independent of the view."""

    kind: str
    """Kind of record, e.g. `Difference of two reports`."""
    name: str
    """Subject of the record."""
    headline: tuple[str, ...]
    """Summary sentences."""
    sections: tuple[Section, ...]
    opening: tuple[Block, ...] = ()
    """Blocks below the headline, without a title."""
    created: str = ""
    """Creation time of the record."""
    version: str = ""
    """Version of Partita that wrote it; empty: this version."""
    sign: str = ""
    """Symbol of the outcome, for views with any character."""
    tone: Tone = "plain"
    """Tone of the first sentence of the headline."""


def table(
    caption: str,
    columns: Iterable[Head],
    rows: Iterable[Row | Sequence[Cell]],
    *,
    name: int = 0,
    rest: Callable[[int], str] | None = None,
    obvious: bool = False,
    most: int = 12,
) -> Table:
    """A table from columns and rows of cells."""
    heads = tuple(Column(column, number=False) if isinstance(column, str) else column for column in columns)
    made = tuple(row if isinstance(row, Row) else Row(tuple(row)) for row in rows)
    return Table(caption, heads, made, name, rest, obvious, most)


def numbers(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(map(Column, titles))


def pairs(caption: str, rows: Iterable[tuple[str, str | None]]) -> Pairs:
    """Names with one value each, without empty values."""
    return Pairs(caption, tuple((name, (value,)) for name, value in rows if value))


def fields_of(record: BaseModel, *exclude: str, prefix: str = "") -> list[tuple[str, str]]:
    """Names and values of a record's fields as text, without nested records, unknown values and counts of 0."""
    return [
        (f"{prefix}{name.removesuffix('_bytes').replace('_', ' ')}", _value_text(name, value))
        for name, value in record
        if name not in exclude
        and value not in (None, "", (), {})
        and not (type(value) is int and value == 0)
        and not any(isinstance(each, BaseModel) for each in _items(value))
    ]


def _items(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _value_text(name: str, value: object) -> str:
    """The value of a field; the suffix of its name is the unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return human_bytes(value) if name.endswith("_bytes") else f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key or 'ai.onnx'} {each}" for key, each in value.items())
    if isinstance(value, float):
        return decimals(value) if abs(value) >= 100 else f"{value:.6g}"
    return name_some(map(str, _items(value)))


def text_of(cell: Cell) -> str:
    """The text of a cell."""
    return cell if isinstance(cell, str) else cell.text


FINDINGS = 2
"""Maximum shown groups without a title, such as evidence of one reason."""


def shown_blocks(blocks: Sequence[Block], hint: str = "") -> list[Block]:
    """Blocks without folds and maps, and with the first untitled groups only, followed by the number of others.

    `hint`: suffix of that line with the views that show them.
    """
    findings = [block for block in blocks if isinstance(block, Group) and not block.title]
    more = f"and {plural(len(findings) - FINDINGS, 'more group')} of nodes with other evidence{hint}"
    shown: list[Block] = []
    for block in blocks:
        if block in findings[FINDINGS:]:
            shown += [Line(more, tone="quiet")] if block is findings[FINDINGS] else []
        elif not isinstance(block, Fold | LayerMap):
            shown.append(block)
    return shown


def shown_rows(table: Table) -> tuple[tuple[Row, ...], str]:
    """The first rows of a table and a summary of the others; all rows if the table has no summary."""
    if table.summarise_rest is None or len(table.rows) <= table.maximum_rows:
        return table.rows, ""
    return table.rows[: table.maximum_rows], table.summarise_rest(table.maximum_rows)
