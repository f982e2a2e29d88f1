"""The blocks of a section on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from partita.observations.native_text import cut
from partita.partition_reports.render.terminal import ALARM, BOLD, DIM, INDENT, PLAIN, Page
from partita.partition_reports.sections.model import (
    Block,
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
