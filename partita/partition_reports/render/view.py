"""What every view is, and how it is found: a file of a folder of views, whose name is the view's name.

A folder of views shows one kind of record: `partition_reports/views` a report, `diff/views` what is different in
another one, `bench/views` what bench measured. Each file in it exposes `VIEW`; files and folders that begin with an
underscore are parts of a view. JSON, HTML and Markdown need no file: they are made from the record, or from its
`document` in `document.py` or `sections.py` beside the folder. Libraries that only one view needs are imported by that
view's file, which is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from partita.observations.records import Record

REPORT_VIEWS = "partita.partition_reports.views"
OF_DOCUMENT = ("html", "json", "markdown")
"""Views that every folder has."""


@dataclass(frozen=True, slots=True)
class View:
    """One way to look at a record of the kind that its folder shows."""

    name: str
    suffix: str
    """Of a file that holds this view, e.g. .json."""
    summary: str
    to_text: Callable[[Any], str]
    """The record -> the whole view as text, ending in a newline. Raises ReportError where the record has not what the
    view shows.
    """
    print_to: Callable[[Any, Console], None] | None = None
    """Prints the same at the width of a console, with colour; None where the text is a file's whatever shows it."""
    what: str = ""
    """What a file of it is called in messages; empty: as the view is."""
    hint: str = ""
    """How to open such a file."""


def json_view(summary: str) -> View:
    """A record as JSON in plain ASCII: names can hold what a terminal would act on."""

    def to_text(record: Record) -> str:
        values = record.model_dump(mode="json", by_alias=True, warnings=False)
        return json.dumps(values, indent=2, allow_nan=False) + "\n"

    return View("json", ".json", summary, to_text)


def view_names(folder: str = REPORT_VIEWS) -> tuple[str, ...]:
    """Names of all views of a folder, which is given as a package, without loading any."""
    return tuple(sorted({*_files(folder), *OF_DOCUMENT}))


def _files(folder: str) -> list[str]:
    """Names of the views that have a file."""
    found = (entry.name for entry in pkgutil.iter_modules(importlib.import_module(folder).__path__))
    return [name for name in found if not name.startswith("_")]


def _made(name: str, folder: str) -> View:
    """The view of a folder that has no file for it."""
    if name == "json":
        return json_view("as JSON")
    room = importlib.import_module(folder.removesuffix(".views"))
    beside = {entry.name for entry in pkgutil.iter_modules(room.__path__)}
    file = "document" if "document" in beside else "sections"
    document = importlib.import_module(f"{room.__name__}.{file}").document
    renderer = importlib.import_module(f"{__package__}.{name}")
    view: View = getattr(renderer, f"{name}_view")(f"as {name}", document)
    return view


def load_view(name: str, folder: str = REPORT_VIEWS) -> View:
    """The view called `name`. Raises UsageError when there is none, ValueError when its file breaks the contract."""
    if name not in view_names(folder):
        raise UsageError(f"no view is called {name!r}; there are: {', '.join(view_names(folder))}")
    if name not in _files(folder):
        return _made(name, folder)
    view = getattr(importlib.import_module(f"{folder}.{name}"), "VIEW", None)
    if not isinstance(view, View) or view.name != name:
        raise ValueError(f"{folder}.{name}: VIEW must be a View whose name is {name!r}")
    return view
