"""A support table as one HTML page."""

from __future__ import annotations

from partita.partition_reports.render.html import render
from partita.partition_reports.render.view import View
from partita.support.records import SupportTable
from partita.support.sections import headline, sections


def _to_text(found: SupportTable) -> str:
    """The whole page."""
    parts = sections(found)
    return render(
        __package__,
        "support",
        {
            "title": f"Support: {found.provider.name}",
            "version": found.partita_version,
            "contents": [(section.key, section.title) for section in parts],
            "headline": headline(found),
            "created": found.created,
            "provider": found.provider.name,
            "sections": parts,
        },
    )


VIEW = View("html", ".html", "a support table as one page for a browser", _to_text, what="page")
