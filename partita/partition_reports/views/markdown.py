"""The report as GitHub Markdown, for CI job summaries and pull request comments."""

from __future__ import annotations

from collections.abc import Iterator

from partita.partition_reports.records import Report
from partita.partition_reports.render.markdown import cell_text, safe, write_section
from partita.partition_reports.render.view import View
from partita.partition_reports.sections.model import LEFT_OUT
from partita.partition_reports.sections.overview import Overview, glance
from partita.partition_reports.sections.report import sections

SHOWN = ("phases", "fallbacks")
"""Expanded sections; others are collapsed."""


def to_text(report: Report) -> str:
    """The report as Markdown."""
    top = glance(report)
    parts = [*_head(top)]
    for section in sections(report):
        if section.key not in LEFT_OUT:
            parts += write_section(section, folded=section.key not in SHOWN)
    return "\n".join(parts).rstrip() + "\n"


def _head(top: Overview) -> Iterator[str]:
    """Headline, warnings, and the five answers as a table."""
    yield f"### {top.state.sign} {safe(top.state.headline)}"
    yield ""
    yield f"{safe(top.verdict)}."
    yield ""
    for flag in top.flags:
        yield f"**{safe(flag.label)}**: {safe(flag.text)}"
        yield ""
    yield "| question | answer | more |"
    yield "| :--- | :--- | :--- |"
    for answer in top.questions:
        lines = "<br>".join(map(cell_text, answer.lines))
        yield f"| {safe(answer.question)} | {safe(answer.figure)} | {lines} |"
    yield ""
    yield f"<sub>{safe(top.name)}: {safe(top.request)}</sub>"
    yield ""


VIEW = View("markdown", ".md", "the report as Markdown, for a comment", to_text)
