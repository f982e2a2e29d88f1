"""The views of a kind of record.

The module with a record's document has `VIEWS`: text, brief, Markdown and HTML use the document, JSON the record. Other
views are modules with `VIEW`, listed in `own`, and imported on demand.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from partita.errors import UsageError
from partita.partition_reports.render.view import View

if TYPE_CHECKING:
    from rich.console import Console

    from partita.partition_reports.sections.model import Document

REPORT_VIEWS = "partita.partition_reports.views"
GENERAL = ("brief", "html", "json", "markdown", "text")
"""Views of every record."""


@dataclass(frozen=True, slots=True)
class Views:
    """The views of a kind of record."""

    document: Callable[[Any], Document] | None
    """Returns the document of a record; None if every view except JSON has its own module."""
    folded: Collection[str] = ()
    """Keys of sections that are collapsed in Markdown."""
    unfold: bool = False
    """Include folds in Markdown, collapsed."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Name of a view -> its module."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all views."""
        return tuple(sorted({*GENERAL, *self.modules}))

    def load(self, name: str) -> View:
        """The view of a name."""
        if name in self.modules:
            found: View = importlib.import_module(self.modules[name]).VIEW
            return found
        if name == "json":
            from partita.partition_reports.storage import to_json

            return View("json", ".json", "as JSON", to_json)
        assert self.document is not None
        if name == "markdown":
            from partita.partition_reports.render.markdown import markdown_view

            return markdown_view(self.document, folded=self.folded, unfold=self.unfold)
        if name == "html":
            from partita.partition_reports.render.html import html_view

            return html_view(self.document)
        from partita.partition_reports.render.blocks import document_view

        return document_view(name, self.document if name == "text" else self._headline)

    def _headline(self, record: Any) -> Document:
        assert self.document is not None
        return replace(self.document(record), sections=())


def _views(where: str) -> Views:
    found: Views = importlib.import_module(where).VIEWS
    return found


def view_names(where: str = REPORT_VIEWS) -> tuple[str, ...]:
    """Names of the views of a module."""
    return _views(where).names


def load_view(name: str, where: str = REPORT_VIEWS) -> View:
    """The view of a name. Raises UsageError if there is none."""
    views = _views(where)
    if name not in views.names:
        raise UsageError(f"unknown view {name!r}; choose from: {', '.join(views.names)}")
    return views.load(name)


def print_text(record: Any, where: str, console: Console) -> None:
    """Print a record to a console."""
    view = load_view("text", where)
    assert view.print_to is not None
    view.print_to(record, console)
