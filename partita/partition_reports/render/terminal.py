"""Text views on a terminal: headings, paragraphs, tables and blocks, laid out by rich at the width of a console."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from partita.observations.native_text import cut
from partita.observations.text_format import clean
from partita.partition_reports.sections.model import (
    Block,
    Column,
    Command,
    Document,
    Group,
    Line,
    Pairs,
    Plot,
    Section,
    Table,
    Tone,
    shown_blocks,
    shown_rows,
    text_of,
)
from partita.remedies import quote

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
        grid = RichTable.grid(padding=(0, GAP, 0, 0))
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
) -> RichTable:
    """Columns of `part` side by side. Texts are wrapped first, then headings and numbers."""
    least = _total([lengths[n].natural if columns[n].number else lengths[n].least for n in part])
    whole = _total([lengths[n].natural for n in part])
    grid = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), border_style=DIM)
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


TONES: dict[Tone, Style] = {
    "plain": PLAIN,
    "quiet": DIM,
    "good": Style(color="green"),
    "mild": Style(color="cyan"),
    "warn": Style(color="yellow"),
    "bad": ALARM,
}
COMMAND = Style(bold=True, color="cyan")
MOST_LINES, LEAST_LINES = 10, 2
"""Lines of the brief view, and of a shortened sentence in it."""
ESSENTIAL = ("fallbacks", "cost", "remedy")
"""Labels of sentences that the brief view always has."""
CUT = 8
"""Characters removed at a time from a sentence that is too long."""


def show_document(page: Page, document: Document) -> None:
    """Print headline, opening and sections."""
    page.lines(_headline(page, document))
    if document.opening:
        if document.headline:
            page.blank()
        _show_blocks(page, document.opening, INDENT)
    for section in document.sections:
        if shown_blocks(section.blocks):
            show_section(page, section)


def _headline(page: Page, document: Document) -> list[Text]:
    """The first sentences, in the colour of the outcome."""
    style = BOLD + Style(color=TONES[document.tone].color)
    return [line for sentence in document.headline for line in page.wrapped(sentence, style=style)]


def show_brief(page: Page, document: Document) -> None:
    """Print headline and opening in at most ten lines, in order; sentences without room are omitted.

    Sentences are cut to two lines if an essential one would be omitted otherwise.
    """
    shown = _brief(page, document, MOST_LINES) or _brief(page, document, LEAST_LINES, required=False) or []
    page.lines(shown)


def _brief(page: Page, document: Document, most: int, *, required: bool = True) -> list[Text] | None:
    """The lines, with at most `most` of a sentence; with `required` None if an essential one has no room."""
    lines = _headline(page, document)
    for block in document.opening:
        part = list[Text]()
        if isinstance(block, Line):
            part = _paragraph(page, block, most)
        elif isinstance(block, Command):
            part = page.command(block.arguments, COMMAND)
        if len(lines) + len(part) <= MOST_LINES:
            lines += part
        elif required and isinstance(block, Line) and block.label in ESSENTIAL:
            return None
    return lines


def _paragraph(page: Page, line: Line, most: int) -> list[Text]:
    """A labelled sentence, cut in its middle if it takes more than `most` lines."""
    text = text_of(line.text)
    longest = len(text)
    while True:
        made = page.wrapped(cut(text, longest), hang=INDENT, label=line.label, style=TONES[line.tone])
        if len(made) <= most:
            return made
        longest -= CUT


def show_section(page: Page, section: Section) -> None:
    """Print a section with its title."""
    page.heading(f"{section.title}: {section.about}" if section.about else section.title)
    _show_blocks(page, section.blocks, INDENT)


def _show_blocks(page: Page, blocks: Sequence[Block], indent: int) -> None:
    """Print the blocks that a terminal shows."""
    shown = shown_blocks(blocks, "; explain and the html view show them")
    for number, block in enumerate(shown):
        apart = number > 0 and (
            isinstance(block, Table) or isinstance(shown[number - 1], Table) and not isinstance(block, Line)
        )
        _show_block(page, block, indent, apart=apart)


def _show_block(page: Page, block: Block, indent: int, *, apart: bool) -> None:
    """Print one block. `apart`: after an empty line."""
    if apart:
        page.blank()
    if isinstance(block, Line):
        _show_line(page, block, indent)
    elif isinstance(block, Command):
        show_command(page, block, indent)
    elif isinstance(block, Pairs):
        rows = [(name if n == 0 else "", value) for name, values in block.rows for n, value in enumerate(values)]
        page.pairs(rows)
    elif isinstance(block, Table):
        _show_table(page, block)
    elif isinstance(block, Plot):
        _show_line(page, Line(block.line, block.caption), indent)
    elif isinstance(block, Group):
        if block.title:
            page.line(block.title, indent=indent, hang=INDENT, style=BOLD)
        _show_blocks(page, block.blocks, indent + INDENT if block.title else indent)


def _show_line(page: Page, line: Line, indent: int) -> None:
    """Print a sentence with its label."""
    text = text_of(line.text)
    page.line(text, indent=indent, hang=INDENT if line.label else 0, label=line.label, style=TONES[line.tone])


def show_command(page: Page, command: Command, indent: int) -> None:
    """Print a command on separate lines, for copying."""
    page.lines(page.command(command.arguments, COMMAND, indent=indent))
    if command.does:
        page.line(command.does, indent=indent + INDENT, style=DIM)


def _show_table(page: Page, table: Table) -> None:
    """Print the first rows of a table and a summary of the others."""
    rows, rest = shown_rows(table)
    if not table.redundant_caption:
        page.line(table.caption, style=DIM)
    page.table(table.columns, [[text_of(cell) for cell in row.cells] for row in rows], rest)
