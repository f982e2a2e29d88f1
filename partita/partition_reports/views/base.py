"""What every view is: a name and a function from a report, and what else it takes, to text.

One file per view in this folder exposes `VIEW`; the file name is the view's name. Files that begin with an underscore
are parts of a view. Libraries that only one view needs are imported by that view's file, which is loaded when it is
asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from partita.errors import UsageError


@dataclass(frozen=True, slots=True)
class View:
    """One way to look at a report."""

    name: str
    suffix: str
    """Of a file that holds this view, e.g. .json."""
    summary: str
    to_text: Callable[..., str]
    """The whole view as text, ending in a newline."""
    takes: tuple[str, ...] = ("report",)
    """What `to_text` is given, in words: a comparison takes two reports."""


def view_names() -> tuple[str, ...]:
    """Names of all views, without loading any."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    found = (entry.name for entry in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(name for name in found if name != "base" and not name.startswith("_")))


def load_view(name: str) -> View:
    """The view called `name`. Raises UsageError when there is none, ValueError when its file breaks the contract."""
    if name not in view_names():
        raise UsageError(f"no view is called {name!r}; there are: {', '.join(view_names())}")
    view = importlib.import_module(f"{__name__.rpartition('.')[0]}.{name}").VIEW
    if not isinstance(view, View) or view.name != name:
        raise ValueError(f"views/{name}.py: VIEW must be a View whose name is {name!r}")
    return view
