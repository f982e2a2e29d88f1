"""The blocks of a section on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style

from partita.partition_reports.render import layout
from partita.partition_reports.render.terminal import ALARM, BOLD, DIM, PLAIN, ROWS, Page
from partita.partition_reports.sections.model import (
    Block,
    Command,
    Fold,
    Group,
    Line,
    Pairs,
    Section,
    Table,
    Tone,
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
INDENT = 2
FINDINGS = 2
"""Groups without a title, such as pieces of evidence of one reason, that are shown below each other."""


def show_section(page: Page, section: Section) -> None:
    """A section under its title."""
    page.heading(f"{section.title}: {section.about}" if section.about else section.title)
    show_blocks(page, section.blocks, INDENT)


def show_blocks(page: Page, blocks: Sequence[Block], indent: int) -> None:
    """Blocks below each other; what is folded away is left out, and of many untitled groups all but the first."""
    shown = [block for block in blocks if not isinstance(block, Fold)]
    findings = [block for block in shown if isinstance(block, Group) and not block.title]
    for number, block in enumerate(shown):
        if block in findings[FINDINGS:]:
            if block is findings[FINDINGS]:
                left = len(findings) - FINDINGS
                page.line(f"and {left} more with other evidence; explain and html show them", indent=indent, style=DIM)
        else:
            apart = number > 0 and (
                isinstance(block, Table) or isinstance(shown[number - 1], Table) and not isinstance(block, Line)
            )
            show_block(page, block, indent, apart=apart)


def show_block(page: Page, block: Block, indent: int, *, apart: bool) -> None:
    """One block. `apart`: after an empty line."""
    if apart:
        page.blank()
    if isinstance(block, Line):
        show_line(page, block, indent)
    elif isinstance(block, Command):
        show_command(page, block, indent)
    elif isinstance(block, Pairs):
        rows = [(name if n == 0 else "", value) for name, values in block.rows for n, value in enumerate(values)]
        page.pairs(rows)
    elif isinstance(block, Table):
        show_table(page, block)
    elif isinstance(block, Group):
        if block.title:
            page.line(block.title, indent=indent, hang=INDENT, style=BOLD)
        show_blocks(page, block.blocks, indent + INDENT if block.title else indent)


def show_line(page: Page, line: Line, indent: int) -> None:
    """A sentence, with its label in front."""
    text = text_of(line.text)
    page.line(text, indent=indent, hang=INDENT if line.label else 0, label=line.label, style=TONES[line.tone])


def show_command(page: Page, command: Command, indent: int) -> None:
    """A command on lines of its own, to be copied as it stands."""
    for line in layout.command([page.harmless(word) for word in command.words], page.console.width, indent=indent):
        page.put(line, COMMAND)
    if command.does:
        page.line(command.does, indent=indent + INDENT, style=DIM)


def show_table(page: Page, table: Table) -> None:
    """The first rows of a table, and what the others come to."""
    shown = table.rows if table.rest is None else table.rows[:ROWS]
    rest = table.rest(ROWS) if table.rest is not None and len(table.rows) > ROWS else ""
    if not table.obvious:
        page.line(table.caption, style=DIM)
    page.table(table.columns, [[text_of(cell) for cell in row.cells] for row in shown], rest)
