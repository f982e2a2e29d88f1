"""Elements of a document: lines, commands, tables and groups. Texts are not escaped; views escape them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, Literal

from pydantic import BaseModel

from partita.observations.text_format import (
    NOT_KNOWN,
    decimals,
    human_bytes,
    name_some,
    percent,
    plural,
    short_provider,
)
from partita.remedies import shell

MOST = 12
"""Maximum shown rows of a long table in views that shorten tables."""
BARS = "▁▂▃▄▅▆▇█"
Tone = Literal["plain", "quiet", "good", "mild", "warn", "bad"]
"""Meaning of a text; a view may show it as a colour, but not as a colour only."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. Numbers are right-aligned and never broken."""

    title: str
    number: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A table."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    """Cells of each row in the order of the columns; the first is the row heading."""
    most: int = 0
    """Maximum shown rows in views that shorten tables; 0: all."""
    obvious: bool = False
    """The caption repeats the headings and may be hidden."""
    headless: bool = False
    """The headings are `name` and `value` and may be hidden."""
    anchors: tuple[str, ...] = ()
    """Target of links to each row; empty for a table without."""


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence or paragraph with an optional label."""

    text: str
    label: str = ""
    tone: Tone = "plain"
    target: str = ""
    """Anchor that the text links to, in views with links."""


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
class Group:
    """Blocks under a heading, or related blocks without a title."""

    title: str
    blocks: tuple[Block, ...]
    anchor: str = ""
    folded: bool = False
    """Collapsed; views without folding omit it."""

    def __post_init__(self) -> None:
        _omit_empty(self, "blocks")


@dataclass(frozen=True, slots=True)
class MapNode:
    """One node in a map, or the mark of a provider in its legend."""

    css: str
    """CSS classes: the colour of its provider, and its form."""
    sign: str
    """Its text, for readers who do not see the colour; empty for small blocks of the provider with the most nodes."""
    title: str
    target: str = ""
    """Id of the node's row in the list of nodes."""


@dataclass(frozen=True, slots=True)
class MapCell:
    """One layer in one phase."""

    nodes: tuple[MapNode, ...]
    summary: str
    fallbacks: str
    """Number of fallback nodes as text; empty for none."""
    operators: str
    """Operators of the fallback nodes by provider, for screen readers."""


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Every node, by layer and phase; only pages show it."""

    caption: str
    introduction: str
    legend: tuple[MapNode, ...]
    phases: tuple[str, ...]
    rows: tuple[tuple[str, tuple[MapCell, ...]], ...]
    """Title and cells of each layer."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Named positive values in order, on a logarithmic axis, with a limit. None: infinite."""

    caption: str
    points: tuple[tuple[str, float | None], ...]
    limit: float
    limit_name: str

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the axis: a tenth of the smallest value that is not 0, and the largest value."""
        known = [value for value in (self.limit, *(value for _, value in self.points)) if value] or [1.0]
        return min(known) / 10, max(known)

    def height(self, value: float | None) -> float:
        """Height of a value from 0 to 1; an infinite one is 1."""
        low, high = self.ends
        return 1.0 if value is None else log(max(value / low, 1.0)) / log(high / low)

    @property
    def as_line(self) -> Line:
        """The heights as characters, for views without pictures."""
        heights = (self.height(value) for _, value in self.points)
        return Line("".join(BARS[min(int(height * len(BARS)), len(BARS) - 1)] for height in heights), self.caption)


Block = Line | Command | Table | Group | Plot | LayerMap


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

    def __post_init__(self) -> None:
        _omit_empty(self, "blocks")


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

    def __post_init__(self) -> None:
        _omit_empty(self, "opening", "sections")


def table(
    caption: str,
    columns: Iterable[Column | str],
    rows: Iterable[Sequence[str]],
    *,
    most: int = 0,
    obvious: bool = False,
) -> Table:
    """A table from columns and rows of cells. A column given as a string holds text."""
    heads = tuple(Column(column, number=False) if isinstance(column, str) else column for column in columns)
    return Table(caption, heads, tuple(map(tuple, rows)), most, obvious)


def numbers(*titles: str) -> tuple[Column | str, ...]:
    """Columns of numbers."""
    return tuple(map(Column, titles))


def pairs(caption: str, rows: Iterable[tuple[str, str | None]]) -> Table:
    """Names with one value each, without empty values."""
    shown = tuple((name, value) for name, value in rows if value)
    return Table(caption, (Column("name", number=False), Column("value", number=False)), shown, headless=True)


def fields_of(record: BaseModel | None, *exclude: str, prefix: str = "") -> list[tuple[str, str]]:
    """Names and values of a record's fields as text, without nested records, unknown values and counts of 0."""
    return [
        (f"{prefix}{label_of(name)}", value_text(name, value))
        for name, value in record or ()
        if name not in exclude
        and value not in (None, "", (), {})
        and not (type(value) is int and value == 0)
        and not any(isinstance(each, BaseModel) for each in _items(value))
    ]


def table_of(caption: str, records: Iterable[Any], *names: str, most: int = 0, obvious: bool = True) -> Table:
    """A row for each record, and a column for each of its fields that any record has a value for.

    `names`: the fields. Records may be dicts, of which all keys are fields except the `anchor` of the row.
    """
    values = [each if isinstance(each, dict) else {name: getattr(each, name) for name in names} for each in records]
    fields = names or dict.fromkeys(name for row in values for name in row if name != "anchor")
    shown = [name for name in fields if not values or not all(_is_blank(row.get(name)) for row in values)]
    heads = tuple(Column(label_of(name), number=any(_is_number(row.get(name)) for row in values)) for name in shown)
    rows = tuple(tuple(value_text(name, row.get(name)) for name in shown) for row in values)
    anchors = tuple(row["anchor"] for row in values if "anchor" in row)
    return Table(caption, heads, rows, most, obvious, anchors=anchors)


def label_of(name: str) -> str:
    """The name of a field as text, without the unit that its value has. Times are shown in ms."""
    short = name.removesuffix("_bytes").removesuffix("_per_run").replace("op_type", "operator")
    return re.sub(r"_us(?=_|$)", "_ms", short).replace("_", " ")


def value_text(name: str, value: object) -> str:
    """The value of a field as text; its name has the unit. Unknown is `-`. Different numbers of phases are `5 / 1`."""
    if value is None:
        return NOT_KNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key or 'ai.onnx'} {each}" for key, each in value.items())
    if _is_number(value):
        return " / ".join(dict.fromkeys(_number_text(name, each) for each in _items(value)))
    return short_provider(str(value)) if name == "provider" else name_some(map(str, _items(value)))


def _number_text(name: str, value: Any) -> str:
    if value is None:  # in one of several phases
        return NOT_KNOWN
    if "bytes" in name:
        return human_bytes(round(value))
    if re.search("_us(_|$)", name):
        return decimals(value, 1e-3)
    if name.endswith(("share", "_rate")):
        return percent(value)
    if isinstance(value, int):
        return f"{value:,}"
    has_unit = name.endswith(("seconds", "_ms")) or "_per_" in name
    return decimals(value) if has_unit or abs(value) >= 100 else f"{value:.4g}"


def _is_number(value: object) -> bool:
    """Whether it is a number, or a number of each phase."""
    numbers = [each for each in _items(value) if each is not None]
    return bool(numbers) and all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)


def _is_blank(value: object) -> bool:
    return value in (None, "", {}) or (isinstance(value, tuple) and not any(value))


def _items(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _omit_empty(holder: object, *names: str) -> None:
    """Remove from some fields tables without rows, lines without text, and groups and sections without blocks."""
    for name in names:
        parts = getattr(holder, name)
        shown = (part for part in parts if type(part) not in CONTENT or getattr(part, CONTENT[type(part)]))
        object.__setattr__(holder, name, tuple(shown))


CONTENT: dict[type, str] = {Table: "rows", Line: "text", Group: "blocks", Section: "blocks"}
"""Element of a document -> its field that is empty in an element without content."""


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
        elif not (isinstance(block, LayerMap) or (isinstance(block, Group) and block.folded)):
            shown.append(block)
    return shown


def shown_rows(table: Table) -> tuple[tuple[tuple[str, ...], ...], str]:
    """The first rows of a table, and a line about the others; empty if there are none."""
    left = len(table.rows) - table.most
    if not table.most or left <= 0:
        return table.rows, ""
    return table.rows[: table.most], f"and {plural(left, 'more row')}; the JSON has all"
