"""`partita report`: read a report file and hand it to a view."""

from __future__ import annotations

from pathlib import Path

from partita.commands.terminal import stdout_console, write_stdout
from partita.partition_reports.views import json as json_view


def show(file: Path, *, as_json: bool) -> None:
    """Show a report as text, or as the JSON it is stored in."""
    report = json_view.read(file)
    if as_json:
        write_stdout(json_view.to_text(report))
        return
    from partita.partition_reports.views import text

    text.render(report, stdout_console())
