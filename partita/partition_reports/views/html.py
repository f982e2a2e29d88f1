"""The report as one HTML page, from its sections and the pictures of `_page/*.py`."""

from __future__ import annotations

from partita.observations.text_format import short_provider
from partita.partition_reports.outcome import preferred_of
from partita.partition_reports.records import Report
from partita.partition_reports.render.html import render
from partita.partition_reports.render.view import View
from partita.partition_reports.sections.overview import glance
from partita.partition_reports.sections.report import sections
from partita.partition_reports.views._page import layer_map


def to_text(report: Report) -> str:
    """The page."""
    known, top, parts = layer_map.find_marks(report), glance(report), sections(report)
    listed = [("glance", "At a glance")]
    listed += [(section.key, section.title) for section in parts]
    return render(
        __package__,
        "report",
        {
            "title": f"{top.state.headline}: {top.name}",
            "version": report.partita_version,
            "contents": listed,
            "keys": {key for key, _ in listed},
            "report": report,
            "top": top,
            "sections": parts,
            "preferred": short_provider(preferred_of(report)),
            "marks": tuple(known.values()),
            "ribbons": layer_map.draw_ribbons(report, known),
            "map": layer_map.draw_map(report),
        },
    )


VIEW = View("html", ".html", "the report as one HTML page", to_text, file_kind="page")
