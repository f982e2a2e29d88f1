"""Text of records for tests."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from partita.partition_reports.render.show import load_view


def print_text(record: Any, where: str, console: Console, name: str = "text") -> None:
    """Print the text or brief view of a record to a console."""
    view = load_view(name, where)
    assert view.print_to is not None
    view.print_to(record, console)
