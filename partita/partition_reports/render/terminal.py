"""Printing of text views: headings, paragraphs and tables, laid out by rich at the width of a console."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from partita.observations.text_format import clean
from partita.partition_reports.render.view import View
from partita.partition_reports.sections.model import Column
from partita.remedies import quote

FILE_COLUMNS = 100
"""Width of a view in a file."""
LEAST_COLUMNS = 60
"""Minimum width of lines, also on smaller consoles."""
INDENT = 2
GAP = 2
"""Cells between columns."""
READABLE, READABLE_NAME = 12, 0.6
"""Minimum width of a text column before a table is split, and share of the console of the first column."""
UNIT = re.compile(r"(?<=\d) (?=(?:B|KiB|MiB|GiB|TiB|ms|s|%)(?:\W|$))")
PROMPT, GO_ON = "$ ", " \\"
BOLD = Style(bold=True)
DIM = Style(dim=True)
PLAIN = Style()
ALARM = Style(bold=True, color="red")
GOOD = Style(bold=True, color="green")


@dataclass(frozen=True, slots=True)
class Page:
    """A console for plain strings, without markup, control characters and unencodable characters."""

    console: Console

    @property
    def width(self) -> int:
        """Columns of the console, at least 60."""
        return max(self.console.width, LEAST_COLUMNS)

    def sanitised(self, line: str) -> str:
        """A sanitised string."""
        return clean(line, self.console.encoding)

    def heading(self, title: str) -> None:
        """Print an empty line and the title of a section."""
        self.blank()
        self.line(title, indent=0, style=BOLD)

    def blank(self) -> None:
        """Print an empty line."""
        self.console.print()

    def line(
        self, line: str, *, indent: int = INDENT, hang: int = 0, label: str = "", style: Style | str = PLAIN
    ) -> None:
        """Print a paragraph with a label; wrapped lines are indented by `hang` more."""
        self.lines(self.wrapped(line, indent=indent, hang=hang, label=label, style=style))

    def lines(self, lines: Iterable[Text]) -> None:
        """Print lines without wrapping."""
        for line in lines:
            self.console.print(line, soft_wrap=True)

    def wrapped(
        self, line: str, *, indent: int = 0, hang: int = 0, label: str = "", style: Style | str = PLAIN
    ) -> list[Text]:
        """The lines of a paragraph."""
        mark = "" if label.endswith("?") else ":"
        text = Text.assemble(
            (f"{self.sanitised(label)}{mark} ", BOLD) if label else "", self.sanitised(line), style=style
        )
        lines = list(text.wrap(self.console, self.width - indent - hang, overflow="fold"))
        return [_stripped(Text(" " * (indent + (hang if number else 0))) + part) for number, part in enumerate(lines)]

    def put(self, line: str, style: Style = PLAIN) -> None:
        """Print a line without wrapping."""
        self.console.print(Text(self.sanitised(line), style=style), soft_wrap=True)

    def command(self, words: Sequence[str], style: Style, *, indent: int = INDENT) -> list[Text]:
        """A shell command in lines that can be copied, broken between words with a backslash."""
        lines = _command_lines([quote(self.sanitised(word)) for word in words], self.width - indent)
        return [Text(" " * indent + line, style=style) for line in lines]

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names with aligned values."""
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(no_wrap=all(cell_len(name) <= self.width // 2 for name, _ in rows))
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(Text(self.sanitised(name)), Text(self.sanitised(value)))
        self._show(grid)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], rest: str = "") -> None:
        """Print a table, in parts with the first column each if it is too wide. `rest`: a line about omitted rows."""
        heads = [self.sanitised(column.title) for column in columns]
        cells = [[self.sanitised(cell) for cell in row] for row in rows]
        room = self.width - INDENT
        readable = [int(room * READABLE_NAME), *(READABLE for _ in columns[1:])]
        lengths = [
            _Lengths.of(column, [heads[n], *(row[n] for row in cells)], readable[n]) for n, column in enumerate(columns)
        ]
        for number, part in enumerate(_parts(columns, [each.least for each in lengths], room)):
            if number:
                self.blank()
            self._show(_grid(columns, heads, cells, part, lengths, room))
        if rest:
            self.line(rest, style=DIM)

    def _show(self, renderable: RenderableType) -> None:
        """Print a table or grid, indented, without trailing blanks."""
        options = self.console.options.update(width=self.width - INDENT)
        for line in self.console.render_lines(renderable, options, pad=False):
            parts = ((segment.text, segment.style or PLAIN) for segment in line)
            self.console.print(_stripped(Text.assemble(" " * INDENT, *parts)), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Widths of a column."""

    natural: int
    least: int
    """Width with headings and values broken at spaces; for texts a readable width."""

    @classmethod
    def of(cls, column: Column, texts: Sequence[str], readable: int) -> _Lengths:
        """Widths for the heading and the cells of a column."""
        natural = max(map(cell_len, texts))
        broken = texts if column.number else texts[:1]
        words = max(cell_len(word) for text in broken for word in UNIT.sub("\N{NO-BREAK SPACE}", text).split(" "))
        return cls(natural, words if column.number else max(words, min(natural, readable)))


def _parts(columns: Sequence[Column], least: Sequence[int], room: int) -> list[list[int]]:
    """Column numbers of each part of a table: the first column and as many others as fit, groups together."""
    parts = [[0]]
    for _, group in groupby(range(1, len(columns)), lambda n: columns[n].group or n):
        numbers = list(group)
        if len(parts[-1]) > 1 and _total([least[n] for n in (*parts[-1], *numbers)]) > room:
            parts.append([0])
        parts[-1] += numbers
    return parts


def _total(widths: Sequence[int]) -> int:
    """Total width of columns."""
    return sum(widths) + GAP * (len(widths) - 1)


def _grid(
    columns: Sequence[Column],
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
    part: Sequence[int],
    lengths: Sequence[_Lengths],
    room: int,
) -> Table:
    """Columns of `part` side by side. Texts are wrapped first, then headings and numbers."""
    least = _total([lengths[n].natural if columns[n].number else lengths[n].least for n in part])
    whole = _total([lengths[n].natural for n in part])
    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), border_style=DIM)
    for n in part:
        fixed = n == 0 or columns[n].number or lengths[n].natural == lengths[n].least
        fits = (least if columns[n].number else whole) <= room
        grid.add_column(
            Text(heads[n], style=BOLD),
            justify="right" if columns[n].number else "left",
            width=None if not fixed else lengths[n].natural if fits else lengths[n].least,
            overflow="fold",
        )
    for row in cells:
        grid.add_row(*(Text(row[n]) for n in part))
    return grid


def _command_lines(words: Sequence[str], room: int) -> Iterator[str]:
    """Words of a command in lines of at most `room` cells; words are not broken."""
    line = f"{PROMPT}{words[0]}"
    for word in words[1:]:
        if cell_len(f"{line} {word}{GO_ON}") > room:
            yield f"{line}{GO_ON}"
            line = " " * 2 * len(PROMPT) + word
        else:
            line = f"{line} {word}"
    yield line


def _stripped(text: Text) -> Text:
    """The text without trailing blanks."""
    text.rstrip()
    return text


def terminal_view(name: str, render: Callable[[Any, Console], None]) -> View:
    """The view that `render` prints to a console, or to a file without colour."""

    def to_text(record: Any) -> str:
        stream = io.StringIO()
        plain = Console(file=stream, width=FILE_COLUMNS, color_system=None, force_terminal=False, legacy_windows=False)
        render(record, plain)
        return stream.getvalue()

    return View(name, ".txt", to_text, print_to=render)
