"""Sections as GitHub Markdown, for a comment of CI, a pull request or a page of documentation.

Names and log lines of a model come into a comment that others read: they can neither format it, link, mention anybody,
nor end the table that they are in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from partita.observations.text_format import clean
from partita.partition_reports.render.cutting import shown_blocks, shown_rows
from partita.partition_reports.render.view import View
from partita.partition_reports.sections.model import (
    Block,
    Cell,
    Command,
    Document,
    Fold,
    Line,
    Pairs,
    Section,
    Table,
    text_of,
)

SPECIAL = re.compile(r"[\\`*\[\]<>|~&@$]|(?<![^\W_])_|_(?![^\W_])|#(?=\d)|(?<=:)//|(?<=www)\.|^[#+-](?= )")
"""What Markdown or GitHub would act on."""
REFERENCE = re.compile(r"(?<=&#64;)|(?<=&#35;)(?=\d)|(?<=\bgh)(?=-\d)", re.IGNORECASE)
"""Where a mention or the number of an issue begins. GitHub looks for them in the text of the rendered page, so that an
entity does not hide them; a zero-width space behind the mark does.
"""


def markdown_view(
    document_of: Callable[[Any], Document], *, folded: Collection[str] = (), unfold: bool = False
) -> View:
    """The view that writes the document of a record. `folded`, `unfold`: as `write_document` has them."""

    def to_text(record: Any) -> str:
        return write_document(document_of(record), folded=folded, unfold=unfold)

    return View("markdown", ".md", "as Markdown", to_text)


def write_document(document: Document, *, folded: Collection[str] = (), unfold: bool = False) -> str:
    """The whole of it. `folded`: sections of which a reader sees the title first. `unfold`: with what other views fold
    away, folded here, too.
    """
    first, *others = document.headline
    parts = [f"### {safe(first)}", ""]
    for sentence in others:
        parts += [safe(sentence), ""]
    parts += write_blocks(document.opening, unfold=unfold)
    for section in document.sections:
        parts += write_section(section, folded=section.key in folded, unfold=unfold)
    return "\n".join(parts).rstrip() + "\n"


def safe(text: str) -> str:
    """Text that is nothing but text: marks that mean something become entities, and nobody is mentioned."""
    return REFERENCE.sub("&#8203;", _literal(text))


def _literal(text: str) -> str:
    return SPECIAL.sub(lambda found: "".join(f"&#{ord(mark)};" for mark in found[0]), clean(text))


def say(line: Cell | Command) -> str:
    """A sentence or a command within a cell."""
    # GitHub looks for no mentions in code, which is to be copied as it is.
    return f"<code>{_literal(line.text)}</code>" if isinstance(line, Command) else safe(text_of(line))


def write_section(section: Section, *, folded: bool = False, unfold: bool = False) -> Iterator[str]:
    """A section, open or folded."""
    title = safe(f"{section.title}: {section.about}" if section.about else section.title)
    if folded:
        yield from _write_folded(title, section.blocks, unfold=unfold)
        yield ""
        return
    yield f"#### {title}"
    yield ""
    yield from write_blocks(section.blocks, unfold=unfold)


def _write_folded(title: str, blocks: Sequence[Block], *, unfold: bool) -> Iterator[str]:
    """Blocks behind a title, which is safe."""
    yield f"<details><summary>{title}</summary>"
    yield ""
    yield from write_blocks(blocks, unfold=unfold)
    yield "</details>"


def write_blocks(blocks: Sequence[Block], *, unfold: bool = False) -> Iterator[str]:
    """Blocks below each other, as far as a comment shows them."""
    for block in blocks if unfold else shown_blocks(blocks):
        yield from write_block(block, unfold=unfold)
        yield ""


def write_block(block: Block, *, unfold: bool = False) -> Iterator[str]:
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
    elif isinstance(block, Fold):
        yield from _write_folded(safe(block.title), block.blocks, unfold=unfold)
    else:
        if block.title:
            yield f"**{safe(block.title)}**"
            yield ""
        yield from write_blocks(block.blocks, unfold=unfold)


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
