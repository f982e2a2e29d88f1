"""The report as one HTML page, from its sections and the pictures of `_page/*.py`."""

from __future__ import annotations

from partita.observations.text_format import short_provider
from partita.partition_reports.outcome import wanted_of
from partita.partition_reports.records import Report
from partita.partition_reports.render.html import render
from partita.partition_reports.render.view import View
from partita.partition_reports.sections.glance import glance
from partita.partition_reports.sections.report import sections
from partita.partition_reports.views._page import layer_map, marks, ribbons, timeline

AFTER_TIMELINE = ("cache", "nodes", "checks", "sources")
"""The timeline comes before the first of these sections."""


def to_text(report: Report) -> str:
    """The page."""
    known, top, parts = marks.find_marks(report), glance(report), sections(report)
    before = next((section.key for section in parts if section.key in AFTER_TIMELINE), "")
    listed = [("glance", "At a glance")]
    for section in parts:
        listed += [("timeline", "Timeline")] if section.key == before else []
        listed.append((section.key, section.title))
    return render(
        __package__,
        "report",
        {
            "title": f"{top.state.headline}: {top.name}",
            "version": report.partita_version,
            "contents": listed,
            "keys": {key for key, _ in listed},
            "timeline_before": before,
            "report": report,
            "top": top,
            "sections": parts,
            "wanted": short_provider(wanted_of(report)),
            "marks": tuple(known.values()),
            "ribbons": ribbons.draw_ribbons(report, known),
            "map": layer_map.draw_map(report),
            "runs": timeline.draw_runs(report),
            "no_runs": timeline.why_none(report),
        },
    )


VIEW = View("html", ".html", "the report as one page for a browser", to_text, what="page")
