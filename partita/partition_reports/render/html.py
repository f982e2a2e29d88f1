"""Self-contained HTML pages: no server, no network, readable without JavaScript.

Every text goes through `_harmless` and Jinja's escaping; a content security policy allows only the page's own style and
script.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import partita
from partita.observations.text_format import clean
from partita.partition_reports.sections.model import Document, Table

LONG = 28
"""Minimum characters of a text that needs a wide column."""


def write_document(document: Document) -> str:
    """A document as a page, with every section in full."""
    environment = Environment(
        loader=PackageLoader(__package__ or "", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(widths_of=_widths_of, kind_of=lambda block: type(block).__name__.lower())
    return environment.get_template("document.html.jinja").render(
        document=document,
        version=document.version or partita.__version__,
        style=Markup(_read_part("page.css")),
        script=Markup(_read_part("page.js")),
        policy=policy(),
    )


def policy() -> str:
    """The content security policy of every page, with the hashes of its style and script."""
    digests = [hashlib.sha256(_read_part(name).encode()).digest() for name in ("page.css", "page.js")]
    style, script = (f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    allowed = f"style-src {style}; script-src {script}"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _harmless(value: object) -> object:
    """Text without control and bidirectional characters, before escaping; other values are unchanged."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return clean(value)


def _read_part(name: str) -> str:
    """A file of the folder `page`."""
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _widths_of(table: Table) -> list[str]:
    """CSS class of each column: n for numbers, w for long texts, empty for short ones."""
    longest = [max((len(row[at]) for row in table.rows), default=0) for at in range(len(table.columns))]
    return [
        "n" if column.number else "w" if length > LONG else ""
        for column, length in zip(table.columns, longest, strict=True)
    ]
