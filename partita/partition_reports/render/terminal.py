"""Text views on a terminal, laid out by rich at the width of a console."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from partita.observations.native_text import cut
from partita.observations.text_format import clean
from partita.partition_reports.sections.model import (
    Block,
    Command,
    Document,
    Group,
    Line,
    Plot,
    Table,
    Tone,
    shown_blocks,
    shown_rows,
)
from partita.remedies import quote

LEAST_COLUMNS = 60
"""Minimum width of lines, also on smaller consoles."""
INDENT = 2
GAP = 2
"""Cells between columns."""
READABLE, READABLE_NAME = 12, 0.6
"""Minimum width of a column of text, and share of the console of the first column; a table without room is split."""
PROMPT, GO_ON = "$ ", " \\"
PLAIN = Style()
BOLD = Style(bold=True)
DIM = Style(dim=True)
ALARM = Style(bold=True, color="red")
GOOD = Style(bold=True, color="green")
COMMAND = Style(bold=True, color="cyan")
TONES: dict[Tone, Style] = {
    "plain": PLAIN,
    "quiet": DIM,
    "good": Style(color="green"),
    "mild": Style(color="cyan"),
    "warn": Style(color="yellow"),
    "bad": ALARM,
}
MOST_LINES, LEAST_LINES = 10, 2
"""Lines of the brief view, and of a shortened sentence in it."""
ESSENTIAL = ("fallbacks", "cost", "remedy")
"""Labels of sentences that the brief view always has."""
CUT = 8
"""Characters removed at a time from a sentence that is too long."""


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

    def lines(self, lines: Iterable[Text]) -> None:
        """Print lines without wrapping and trailing blanks."""
        for line in lines:
            line.rstrip()
            self.console.print(line, soft_wrap=True)

    def put(self, line: str, style: Style = PLAIN) -> None:
        """Print a string without wrapping."""
        self.lines([Text(self.sanitised(line), style=style)])

    def line(self, line: str, *, indent: int = INDENT) -> None:
        """Print a paragraph."""
        self.lines(self.wrapped(line, indent=indent))

    def wrapped(
        self, line: str, *, indent: int = 0, hang: int = 0, label: str = "", style: Style | str = PLAIN
    ) -> list[Text]:
        """The lines of a paragraph with a label; wrapped lines are indented by `hang` more."""
        text = Text.assemble((f"{self.sanitised(label)}: ", BOLD) if label else "", self.sanitised(line), style=style)
        lines = list(text.wrap(self.console, self.width - indent - hang, overflow="fold"))
        return [Text(" " * (indent + (hang if number else 0))) + part for number, part in enumerate(lines)]

    def command(self, words: Sequence[str], indent: int = INDENT) -> list[Text]:
        """A shell command in lines that can be copied, broken between words with a backslash."""
        first, *others = [quote(self.sanitised(word)) for word in words]
        lines = [f"{PROMPT}{first}"]
        for word in others:
            if cell_len(f"{lines[-1]} {word}{GO_ON}") > self.width - indent:
                lines[-1] += GO_ON
                lines.append(" " * 2 * len(PROMPT) + word)
            else:
                lines[-1] += f" {word}"
        return [Text(" " * indent + line, style=COMMAND) for line in lines]

    def table(self, table: Table) -> None:
        """Print the first rows of a table and the number of the others.

        A table that is too wide is split into parts with the first column each.
        """
        room, (rows, rest), columns = self.width - INDENT, shown_rows(table), table.columns
        if not table.obvious and not table.headless:
            self.lines(self.wrapped(table.caption, indent=INDENT, style=DIM))
        heads = ["" if table.headless else self.sanitised(column.title) for column in columns]
        cells = [[self.sanitised(cell) for cell in row] for row in rows]
        natural = [max(cell_len(row[n]) for row in (heads, *cells)) for n in range(len(columns))]
        is_wide = _total(natural) > room
        if is_wide:
            heads = [head.replace(" ", "\n") if columns[n].number else head for n, head in enumerate(heads)]
        least = [
            max(map(cell_len, (*heads[n].split("\n"), *(row[n] for row in cells))))
            if column.number
            else min(natural[n], READABLE if n else int(room * READABLE_NAME))
            for n, column in enumerate(columns)
        ]
        for number, part in enumerate(_parts(least, room)):
            if number:
                self.console.print()
            grid = RichTable(box=None if table.headless else SIMPLE_HEAD, show_header=not table.headless)
            grid.show_edge, grid.pad_edge, grid.border_style = False, False, DIM
            grid.padding = (0, GAP if table.headless else GAP - 1, 0, 0)
            for n in part:
                is_number, width = columns[n].number, least[n] if is_wide and n == 0 else None
                justify: Literal["left", "right"] = "right" if is_number else "left"
                grid.add_column(Text(heads[n], BOLD), justify=justify, width=width, no_wrap=is_number, overflow="fold")
            for row in cells:
                grid.add_row(*(Text(row[n]) for n in part))
            for line in self.console.render_lines(grid, self.console.options.update(width=room), pad=False):
                parts = ((segment.text, segment.style or PLAIN) for segment in line)
                self.lines([Text.assemble(" " * INDENT, *parts)])
        if rest:
            self.lines(self.wrapped(rest, indent=INDENT, style=DIM))


def _parts(least: Sequence[int], room: int) -> list[list[int]]:
    """Column numbers of each part of a table: the first column and as many others as fit in their least widths."""
    parts = [[0]]
    for n in range(1, len(least)):
        if len(parts[-1]) > 1 and _total([least[column] for column in (*parts[-1], n)]) > room:
            parts.append([0])
        parts[-1].append(n)
    return parts


def _total(widths: Sequence[int]) -> int:
    """Total width of columns."""
    return sum(widths) + GAP * (len(widths) - 1)


def show_document(page: Page, document: Document) -> None:
    """Print headline, opening and sections."""
    page.lines(_headline(page, document))
    if document.opening:
        page.console.print()
        _show_blocks(page, document.opening, INDENT)
    for section in document.sections:
        if shown_blocks(section.blocks):
            page.console.print()
            title = f"{section.title}: {section.about}" if section.about else section.title
            page.lines(page.wrapped(title, style=BOLD))
            _show_blocks(page, section.blocks, INDENT)


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
            part = page.command(block.arguments)
        if len(lines) + len(part) <= MOST_LINES:
            lines += part
        elif required and isinstance(block, Line) and block.label in ESSENTIAL:
            return None
    return lines


def _paragraph(page: Page, line: Line, most: int) -> list[Text]:
    """A labelled sentence, cut in its middle if it takes more than `most` lines."""
    longest = len(line.text)
    while True:
        made = page.wrapped(cut(line.text, longest), hang=INDENT, label=line.label, style=TONES[line.tone])
        if len(made) <= most:
            return made
        longest -= CUT


def _show_blocks(page: Page, blocks: Sequence[Block], indent: int) -> None:
    """Print the blocks that a terminal shows, with empty lines around tables."""
    before: Block | None = None
    for block in shown_blocks(blocks, "; explain and the html view show them"):
        if before and (isinstance(block, Table) or isinstance(before, Table) and not isinstance(block, Line)):
            page.console.print()
        _show_block(page, block, indent)
        before = block


def _show_block(page: Page, block: Block, indent: int) -> None:
    """Print one block."""
    block = block.as_line if isinstance(block, Plot) else block
    if isinstance(block, Line):
        hang = INDENT if block.label else 0
        page.lines(page.wrapped(block.text, indent=indent, hang=hang, label=block.label, style=TONES[block.tone]))
    elif isinstance(block, Command):
        page.lines(page.command(block.arguments, indent))
        if block.does:
            page.lines(page.wrapped(block.does, indent=indent + INDENT, style=DIM))
    elif isinstance(block, Table):
        page.table(block)
    elif isinstance(block, Group):
        if block.title:
            page.lines(page.wrapped(block.title, indent=indent, hang=INDENT, style=BOLD))
        _show_blocks(page, block.blocks, indent + INDENT if block.title else indent)
