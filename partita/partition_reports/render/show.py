"""The views of a kind of record.

The module with a record's document has `VIEWS`: text, brief, Markdown and HTML use the document, JSON the record.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from partita.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from partita.partition_reports.sections.model import Document

REPORT_VIEWS = "partita.partition_reports.sections.report"
FILE_COLUMNS = 100
"""Width of a text view in a file."""
GENERAL = ("brief", "html", "json", "markdown", "text")
"""Views of every record."""


@dataclass(frozen=True, slots=True)
class View:
    """A rendering of one kind of record."""

    name: str
    suffix: str
    """File name suffix, e.g. .json."""
    to_text: Callable[[Any], str]
    """Record -> text with a trailing newline. Raises ReportError if the record lacks the required data."""
    print_to: Callable[[Any, Console], None] | None = None
    """Prints the view at the width of a console, with colour; None for file formats."""
    file_kind: str = ""
    """Name of its file in messages; empty: the view's name."""


@dataclass(frozen=True, slots=True)
class Views:
    """The views of a kind of record."""

    document: Callable[[Any], Document]
    """Returns the document of a record."""
    unfold: bool = False
    """Include folds in Markdown, collapsed."""
    own: Mapping[str, View] = field(default_factory=dict)
    """Further views by name."""


def terminal_view(name: str, render: Callable[[Any, Console], None]) -> View:
    """The view that `render` prints to a console, or to a file without colour."""

    def to_text(record: Any) -> str:
        from rich.console import Console

        stream = io.StringIO()
        plain = Console(file=stream, width=FILE_COLUMNS, color_system=None, force_terminal=False, legacy_windows=False)
        render(record, plain)
        return stream.getvalue()

    return View(name, ".txt", to_text, print_to=render)


def view_names(where: str = REPORT_VIEWS) -> tuple[str, ...]:
    """Names of the views of a module."""
    return tuple(sorted({*GENERAL, *importlib.import_module(where).VIEWS.own}))


def load_view(name: str, where: str = REPORT_VIEWS) -> View:
    """The view of a name. Raises UsageError if there is none."""
    views: Views = importlib.import_module(where).VIEWS
    if name in views.own:
        return views.own[name]
    if name not in GENERAL:
        raise UsageError(f"unknown view {name!r}; choose from: {', '.join(view_names(where))}")
    # A view imports its libraries only when it is used.
    if name == "json":
        from partita.partition_reports.storage import to_json

        return View(name, ".json", to_json)
    if name == "markdown":
        from partita.partition_reports.render import markdown

        return View(name, ".md", lambda record: markdown.write_document(views.document(record), unfold=views.unfold))
    if name == "html":
        from partita.partition_reports.render import html

        return View(name, ".html", lambda record: html.write_document(views.document(record)), file_kind="page")
    from partita.partition_reports.render.terminal import Page, show_brief, show_document

    show = show_brief if name == "brief" else show_document
    return terminal_view(name, lambda record, console: show(Page(console), views.document(record)))
