"""A support table as GitHub Markdown, for a page of documentation or an issue."""

from __future__ import annotations

from collections.abc import Iterator

from partita.partition_reports.render.view import View
from partita.partition_reports.sections.model import Block, Fold
from partita.partition_reports.views.markdown import safe, write_block
from partita.support.records import SupportTable
from partita.support.sections import headline, sections


def _to_text(found: SupportTable) -> str:
    """The whole page."""
    parts = [f"### {safe(headline(found))}", ""]
    for section in sections(found):
        title = f"{section.title}: {section.about}" if section.about else section.title
        parts += [f"#### {safe(title)}", ""]
        for block in section.blocks:
            parts += [*write(block), ""]
    return "\n".join(parts).rstrip() + "\n"


def write(block: Block) -> Iterator[str]:
    """One block; what is folded elsewhere is folded here, too."""
    if not isinstance(block, Fold):
        yield from write_block(block)
        return
    yield f"<details><summary>{safe(block.title)}</summary>"
    yield ""
    for inner in block.blocks:
        yield from write(inner)
        yield ""
    yield "</details>"


VIEW = View("markdown", ".md", "a support table as Markdown", _to_text)
