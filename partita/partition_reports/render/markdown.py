"""Sections as GitHub Markdown, for CI comments, pull requests and documentation.

Names and log lines are escaped: they cannot format, link, mention users or end a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from partita.observations.text_format import clean
from partita.partition_reports.sections.model import (
    Block,
    Command,
    Document,
    Group,
    Line,
    Plot,
    Table,
    shown_blocks,
    shown_rows,
)

SPECIAL = re.compile(r"[\\`*\[\]<>|~&@$]|(?<![^\W_])_|_(?![^\W_])|#(?=\d)|(?<=:)//|(?<=www)\.|^[#+-](?= )")
"""Characters with a meaning in Markdown or on GitHub."""
REFERENCE = re.compile(r"(?<=&#64;)|(?<=&#35;)(?=\d)|(?<=\bgh)(?=-\d)", re.IGNORECASE)
"""Start of a mention or issue number. GitHub finds them in rendered text, where an entity does not hide them, but a
zero-width space does.
"""


def write_document(document: Document, *, unfold: bool = False) -> str:
    """The document as Markdown. `unfold`: include folds, collapsed."""
    first, *others = document.headline
    parts = [f"### {document.sign} {safe(first)}" if document.sign else f"### {safe(first)}", ""]
    for sentence in others:
        parts += [safe(sentence), ""]
    parts += _write_blocks(document.opening, unfold)
    for section in document.sections:
        title = safe(f"{section.title}: {section.about}" if section.about else section.title)
        if not unfold and not shown_blocks(section.blocks):
            continue
        if section.folded:
            parts += [*_write_folded(title, section.blocks, unfold), ""]
        else:
            parts += [f"#### {title}", "", *_write_blocks(section.blocks, unfold)]
    return "\n".join(parts).rstrip() + "\n"


def safe(text: str) -> str:
    """Escaped text without formatting, links and mentions."""
    literal = SPECIAL.sub(lambda found: "".join(f"&#{ord(mark)};" for mark in found[0]), clean(text))
    return REFERENCE.sub("&#8203;", literal)


def _write_folded(title: str, blocks: Sequence[Block], unfold: bool) -> Iterator[str]:
    """Collapsed blocks. `title` is escaped."""
    yield from (f"<details><summary>{title}</summary>", "")
    yield from _write_blocks(blocks, unfold)
    yield "</details>"


def _write_blocks(blocks: Sequence[Block], unfold: bool) -> Iterator[str]:
    """The blocks that a comment shows."""
    for block in blocks if unfold else shown_blocks(blocks):
        yield from write_block(block, unfold=unfold)
        yield ""


def write_block(block: Block, *, unfold: bool = False) -> Iterator[str]:
    """A block of a section as lines of Markdown."""
    block = block.as_line if isinstance(block, Plot) else block
    if isinstance(block, Line):
        label = f"**{safe(block.label)}**: " if block.label else ""
        yield f"{label}{safe(block.text)}"
    elif isinstance(block, Command):
        yield from ("```sh", clean(block.text).replace("```", "` ` `"), "```")
    elif isinstance(block, Table):
        shown, rest = shown_rows(block)
        if not block.obvious and not block.headless:
            yield from (safe(block.caption), "")
        yield f"| {' | '.join(safe(column.title) for column in block.columns)} |"
        yield f"| {' | '.join('---:' if column.number else ':---' for column in block.columns)} |"
        yield from (f"| {' | '.join(map(safe, row))} |" for row in shown)
        yield from ("", safe(rest)) if rest else ()
    elif isinstance(block, Group) and block.folded:
        yield from _write_folded(safe(block.title), block.blocks, unfold)
    elif isinstance(block, Group):
        yield from (f"**{safe(block.title)}**", "") if block.title else ()
        yield from _write_blocks(block.blocks, unfold)
