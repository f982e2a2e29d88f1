"""The report as one HTML page that needs nothing else: no server, no network, and for reading no JavaScript.

The data comes from `_page/*.py`, the look from the template, style and script beside them. Every text of the report
goes through `harmless` and Jinja's escaping; a content security policy lets the page's own style and script run and
nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from partita.partition_reports.records import Report
from partita.partition_reports.verdict import give_verdict
from partita.partition_reports.views._page import (
    figures,
    layers,
    marks,
    overview,
    placement,
    reasons,
    sections,
    timeline,
)
from partita.partition_reports.views.base import View
from partita.partition_reports.wording import clean

PARTS = files(f"{__name__.rpartition('.')[0]}._page")
POLICY = "default-src 'none'; style-src '{style}'; script-src '{script}'; base-uri 'none'; form-action 'none'"


def to_text(report: Report) -> str:
    """The whole page."""
    style, script = read_part("page.css"), read_part("page.js")
    return (
        environment()
        .get_template("page")
        .render(
            style=Markup(style),
            script=Markup(script),
            policy=POLICY.format(style=digest(style), script=digest(script)),
            **contents(report),
        )
    )


def contents(report: Report) -> dict[str, object]:
    """What the template shows, by the names that it uses."""
    known = marks.find_marks(report)
    return {
        "report": report,
        "name": name_of(report),
        "verdict": give_verdict(report),
        "wanted": overview.wanted_of(report).removesuffix("ExecutionProvider"),
        "marks": tuple(known.values()),
        "state": overview.find_state(report),
        "answers": overview.answer_questions(report),
        "ribbons": overview.draw_ribbons(report, known),
        "figures": figures.phase_table(report, known),
        "timing_notes": tuple(f"{phase.name}: {phase.timing_note}." for phase in report.phases),
        "map": layers.draw_map(report),
        "partitions": placement.partition_tables(report),
        "copies": placement.copy_tables(report),
        "reasons": reasons.explain_fallbacks(report),
        "probing": sections.probing_line(report),
        "rejected": sections.rejected_table(report),
        "runs": timeline.draw_runs(report),
        "no_runs": timeline.why_none(report),
        "cache": sections.cache_table(report),
        "cache_told": figures.say_cache(report),
        "bodies": placement.body_lines(report),
        "groups": placement.group_tables(report),
        "nodes": placement.node_tables(report),
        "facts": facts(report),
        "checks": sections.check_table(report),
        "disagreements": sections.disagreement_table(report),
        "sources": sections.source_table(report),
    }


def facts(report: Report) -> tuple[object, ...]:
    """The tables about the request and the machine that are there."""
    found = (
        sections.request_table(report),
        sections.chain_table(report),
        sections.dry_run_table(report),
        sections.totals_table(report),
        sections.memory_table(report),
        sections.environment_table(report),
    )
    return tuple(each for each in found if each is not None)


def name_of(report: Report) -> str:
    """The package or file that the report is about."""
    if report.package is not None:
        return report.package.name
    return report.model.file if report.model is not None else "unknown model"


def environment() -> Environment:
    """Jinja with escaping on, and an error for a name that the template misspells."""
    return Environment(
        loader=DictLoader({"page": read_part("page.html.jinja")}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=harmless,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def harmless(value: object) -> object:
    """Text without control and bidirectional characters; anything else as it is. Escaping comes after this."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return clean(value)


def read_part(name: str) -> str:
    """A file of the folder `_page`."""
    return PARTS.joinpath(name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """How a content security policy names a style or script that stands in the page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


VIEW = View("html", ".html", "the report as one page for a browser", to_text)
