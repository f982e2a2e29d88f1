"""What a section is made of: lines, names with values, tables, groups, and what is folded away. Plain data.

Every text is as the report has it: a view has to make it harmless for where it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from partita.remedies import shell

Tone = Literal["plain", "quiet", "good", "mild", "warn", "bad"]
"""How something is meant; a view may give it a colour, and never a colour alone."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its heading, and whether it holds numbers, which are set right."""

    title: str
    number: bool = True
    group: str = ""
    """Columns of one group, side by side, belong together; a heading that stands alone has it before it."""
    below: bool = False
    """A text that may stand below its row, with its heading, where there is no room beside it."""


@dataclass(frozen=True, slots=True)
class Link:
    """Text that leads to another place of the same page, where a view has such."""

    text: str
    target: str
    """An anchor of a row, a group or a section."""


Cell = str | Link


@dataclass(frozen=True, slots=True)
class Row:
    """Cells in the order of the columns; `anchor` when something leads to it."""

    cells: tuple[Cell, ...]
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its caption. The cell of column `name` is the heading of its row."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    name: int = 0
    rest: Callable[[int], str] | None = None
    """For a view that shows the first n rows: what the others come to, in a sentence. Without it all rows are shown."""
    obvious: bool = False
    """The caption says no more than the headings."""
    most: int = 12
    """How many rows such a view shows."""


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence or paragraph, with a label before it where it has one."""

    text: Cell
    label: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Command:
    """A command to be copied into a shell, word by word, and what it does."""

    words: tuple[str, ...]
    does: str = ""

    @property
    def text(self) -> str:
        """As it is typed."""
        return shell(self.words)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Names, and one or more values to each."""

    caption: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """What stands behind it: a view that can fold does, one that cannot leaves it out."""

    title: str
    blocks: tuple[Block, ...]
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks under a heading of their own; without a title, blocks that belong together."""

    title: str
    blocks: tuple[Block, ...]
    anchor: str = ""


Block = Line | Command | Pairs | Table | Fold | Group


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a report, ready for any renderer."""

    key: str
    """Its name for views, and its anchor."""
    title: str
    blocks: tuple[Block, ...]
    about: str = ""
    """A few words after the title, where there is room."""


@dataclass(frozen=True, slots=True)
class Document:
    """Everything that is said of one record, ready for any renderer: the answer, then what stands behind it."""

    kind: str
    """What it is, e.g. `Difference of two reports`."""
    name: str
    """What it is of."""
    headline: tuple[str, ...]
    """The answer, in sentences."""
    sections: tuple[Section, ...]
    opening: tuple[Block, ...] = ()
    """What stands below the answer, without a title."""
    made: str = ""
    """When the record was made."""
    version: str = ""
    """Of the Partita that made it; empty: this one."""


def table(
    caption: str,
    columns: Iterable[Column],
    rows: Iterable[Row | Sequence[Cell]],
    *,
    name: int = 0,
    rest: Callable[[int], str] | None = None,
    obvious: bool = False,
    most: int = 12,
) -> Table:
    """A table from columns and rows of cells."""
    made = tuple(row if isinstance(row, Row) else Row(tuple(row)) for row in rows)
    return Table(caption, tuple(columns), made, name, rest, obvious, most)


def words(title: str, *, below: bool = False) -> Column:
    """A column of text."""
    return Column(title, number=False, below=below)


def text_of(cell: Cell) -> str:
    """The words of a cell."""
    return cell if isinstance(cell, str) else cell.text
