"""The report as one HTML page that needs nothing else: no server, no network, and for reading no JavaScript.

What it says comes from the sections of the report, its pictures from `_page/*.py`, its look from the templates, style
and script beside them. Every text of the report goes through `harmless` and Jinja's escaping; a content security policy
lets the page's own style and script run and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from partita.observations.text_format import clean, short_provider
from partita.partition_reports.records import Report
from partita.partition_reports.sections.glance import glance
from partita.partition_reports.sections.report import sections
from partita.partition_reports.sections.shared import wanted_of
from partita.partition_reports.views._page import layer_map, marks, ribbons, table_shape, timeline
from partita.partition_reports.views.base import View

PARTS = files(f"{__name__.rpartition('.')[0]}._page")
AFTER_TIMELINE = ("cache", "nodes", "checks", "sources")
"""The first of these that a report has comes after the timeline."""
POLICY = "default-src 'none'; style-src '{style}'; script-src '{script}'; base-uri 'none'; form-action 'none'"


def to_text(report: Report) -> str:
    """The whole page."""
    known, top, parts = marks.find_marks(report), glance(report), sections(report)
    before = next((section.key for section in parts if section.key in AFTER_TIMELINE), "")
    listed = [("glance", "At a glance")]
    for section in parts:
        listed += [("timeline", "Timeline")] if section.key == before else []
        listed.append((section.key, section.title))
    return render(
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


def render(template: str, contents: Mapping[str, object]) -> str:
    """A page from one of the templates, with the style and the script that all have in common."""
    style, script = read_part("page.css"), read_part("page.js")
    policy = POLICY.format(style=digest(style), script=digest(script))
    shared = {"style": Markup(style), "script": Markup(script), "policy": policy}
    return environment().get_template(template).render(**shared, **contents)


def environment() -> Environment:
    """Jinja with escaping on, and an error for a name that the template misspells."""
    names = ("frame", "blocks", "report", "bench")
    made = Environment(
        loader=DictLoader({name: read_part(f"{name}.html.jinja") for name in names}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=harmless,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals.update(shape_of=table_shape.shape_of, kind_of=kind_of)
    return made


def kind_of(block: object) -> str:
    """`table`, `line`, `command`, …: what the templates tell blocks apart by."""
    return type(block).__name__.lower()


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
