"""Self-contained HTML pages: no server, no network, readable without JavaScript.

Every text goes through `_harmless` and Jinja's escaping; a content security policy allows only the page's own style and
script.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

import partita
from partita.observations.text_format import clean
from partita.partition_reports.sections.model import Document, Table

PARTS = files(__package__).joinpath("page")
TEMPLATES = ("blocks", "document")
POLICY = "default-src 'none'; style-src '{style}'; script-src '{script}'; base-uri 'none'; form-action 'none'"


def write_document(document: Document) -> str:
    """A document as a page, with every section in full."""
    return (
        _environment()
        .get_template("document")
        .render(
            document=document,
            version=document.version or partita.__version__,
            style=Markup(read_part("page.css")),
            script=Markup(read_part("page.js")),
            policy=policy(),
        )
    )


def policy() -> str:
    """The content security policy of every page."""
    return POLICY.format(style=_digest(read_part("page.css")), script=_digest(read_part("page.js")))


def _environment() -> Environment:
    """A Jinja environment with escaping and strict names."""
    made = Environment(
        loader=DictLoader({name: read_part(f"{name}.html.jinja") for name in TEMPLATES}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals.update(widths_of=widths_of, kind_of=_kind_of)
    return made


def _kind_of(block: object) -> str:
    """Kind of a block for templates: `table`, `line`, `command`, …"""
    return type(block).__name__.lower()


def _harmless(value: object) -> object:
    """Text without control and bidirectional characters, before escaping; other values are unchanged."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return clean(value)


def read_part(name: str) -> str:
    """A file of the folder `page`."""
    return PARTS.joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Hash of an inline style or script for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


LONG = 28
"""Minimum characters of a text that needs a wide column."""


def widths_of(table: Table) -> list[str]:
    """CSS class of each column: n for numbers, w for long texts, empty for short ones."""
    longest = [max((len(row.cells[at]) for row in table.rows), default=0) for at in range(len(table.columns))]
    return [
        "n" if column.number else "w" if length > LONG else ""
        for column, length in zip(table.columns, longest, strict=True)
    ]
