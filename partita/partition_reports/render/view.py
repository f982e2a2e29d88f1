"""The `View` of a record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


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
