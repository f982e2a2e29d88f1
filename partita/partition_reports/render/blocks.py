"""The blocks of a section on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.style import Style

from partita.partition_reports.render.terminal import ALARM, BOLD, DIM, INDENT, PLAIN, Page, terminal_view
from partita.partition_reports.render.view import View
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


def document_view(name: str, document_of: Callable[[Any], Document]) -> View:
    """The view that prints the document of a record at the width of a console."""

    def render(record: Any, console: Console) -> None:
        show_document(Page(console), document_of(record))

    return terminal_view(name, "for a terminal", render)


def show_document(page: Page, document: Document) -> None:
    """Print headline, opening and sections."""
    for sentence in document.headline:
        page.line(sentence, indent=0, style=BOLD)
    if document.opening:
        if document.headline:
            page.blank()
        _show_blocks(page, document.opening, INDENT)
    for section in document.sections:
        show_section(page, section)


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
    page.command(command.arguments, COMMAND, indent=indent)
    if command.does:
        page.line(command.does, indent=indent + INDENT, style=DIM)


def _show_table(page: Page, table: Table) -> None:
    """Print the first rows of a table and a summary of the others."""
    rows, rest = shown_rows(table)
    if not table.redundant_caption:
        page.line(table.caption, style=DIM)
    page.table(table.columns, [[text_of(cell) for cell in row.cells] for row in rows], rest)
