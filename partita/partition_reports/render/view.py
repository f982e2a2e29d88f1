"""One way to look at a record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class View:
    """One way to look at a record of one kind."""

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
