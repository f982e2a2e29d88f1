"""`partita report`: read a report file and hand it to a view."""

from __future__ import annotations

import sys
from pathlib import Path

from partita.partition_reports.views import json as json_view


def show(file: Path, *, as_json: bool) -> None:
    """Show a report as text, or as the JSON it is stored in."""
    report = json_view.read(file)
    if as_json:
        sys.stdout.write(json_view.to_text(report))
        return
    from rich.console import Console

    from partita.partition_reports.views import text

    text.render(report, Console(highlight=False))
