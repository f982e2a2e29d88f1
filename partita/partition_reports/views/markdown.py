"""The report as GitHub Markdown, for CI job summaries and pull request comments: the answer first, the rest folded.

Names and log lines of a model come into a comment that others read: they can neither format it, link, mention anybody,
nor end the table that they are in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from partita.observations.text_format import clean
from partita.partition_reports.records import Report
from partita.partition_reports.render.cutting import LEFT_OUT, shown_blocks, shown_rows
from partita.partition_reports.render.view import View
from partita.partition_reports.sections.glance import Glance, glance
from partita.partition_reports.sections.model import (
    Block,
    Command,
    Group,
    Line,
    Pairs,
    Section,
    Table,
    text_of,
)
from partita.partition_reports.sections.report import sections

SHOWN = ("phases", "fallbacks")
"""Sections that are open; the others are folded."""
SPECIAL = re.compile(r"[\\`*\[\]<>|~&@]|(?<=:)//|(?<=www)\.|^[#+-](?= )")
"""What Markdown or GitHub would act on."""


def to_text(report: Report) -> str:
    """The whole comment."""
    top = glance(report)
    parts = [*_head(top)]
    for section in sections(report):
        if section.key not in LEFT_OUT:
            parts += _write_section(section)
    return "\n".join(parts).rstrip() + "\n"


def safe(text: str) -> str:
    """Text that is nothing but text: marks that mean something become entities."""
    return SPECIAL.sub(lambda found: "".join(f"&#{ord(mark)};" for mark in found[0]), clean(text))


def _head(top: Glance) -> Iterator[str]:
    """What happened, and the five answers as a table."""
    yield f"### {top.state.sign} {safe(top.state.headline)}"
    yield ""
    yield f"{safe(top.verdict)}."
    yield ""
    for flag in top.flags:
        yield f"**{safe(flag.label)}**: {safe(flag.text)}"
        yield ""
    yield "| question | answer | more |"
    yield "| :--- | :--- | :--- |"
    for answer in top.answers:
        lines = "<br>".join(_say(line) for line in answer.lines)
        yield f"| {safe(answer.question)} | {safe(answer.figure)} | {lines} |"
    yield ""
    yield f"<sub>{safe(top.name)}: {safe(top.asked)}</sub>"
    yield ""


def _say(line: object) -> str:
    """A line or command within a cell."""
    if isinstance(line, Command):
        return f"<code>{safe(line.text)}</code>"
    return safe(line if isinstance(line, str) else getattr(line, "text", ""))


def _write_section(section: Section) -> Iterator[str]:
    """A section, open or folded."""
    title = safe(f"{section.title}: {section.about}" if section.about else section.title)
    if section.key in SHOWN:
        yield f"#### {title}"
        yield ""
        yield from _write_blocks(section.blocks)
        return
    yield f"<details><summary>{title}</summary>"
    yield ""
    yield from _write_blocks(section.blocks)
    yield "</details>"
    yield ""


def _write_blocks(blocks: Sequence[Block]) -> Iterator[str]:
    """Blocks below each other, as far as a comment shows them."""
    for block in shown_blocks(blocks):
        yield from write_block(block)
        yield ""


def write_block(block: Block) -> Iterator[str]:
    """A block of a section as lines of Markdown."""
    if isinstance(block, Line):
        label = f"**{safe(block.label)}**: " if block.label else ""
        yield f"{label}{safe(text_of(block.text))}"
    elif isinstance(block, Command):
        yield "```sh"
        yield clean(block.text).replace("```", "` ` `")
        yield "```"
    elif isinstance(block, Pairs):
        rows = ((name, "<br>".join(map(safe, values))) for name, values in block.rows)
        yield from _write_rows(("what", "value"), (True, True), ((safe(name), values) for name, values in rows))
    elif isinstance(block, Table):
        yield from _write_table(block)
    elif isinstance(block, Group):
        if block.title:
            yield f"**{safe(block.title)}**"
            yield ""
        yield from _write_blocks(block.blocks)


def _write_table(table: Table) -> Iterator[str]:
    """The first rows, and what the others come to."""
    shown, rest = shown_rows(table)
    if not table.obvious:
        yield safe(table.caption)
        yield ""
    cells = ([safe(text_of(cell)) for cell in row.cells] for row in shown)
    yield from _write_rows(
        [safe(column.title) for column in table.columns], [not column.number for column in table.columns], cells
    )
    if rest:
        yield ""
        yield safe(rest)


def _write_rows(heads: Sequence[str], left: Sequence[bool], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table of cells that are safe. `left`: which columns are set left."""
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join(':---' if each else '---:' for each in left)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"


VIEW = View("markdown", ".md", "the report as Markdown, for a comment", to_text)
