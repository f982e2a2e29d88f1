"""`partita support`: what a provider takes, measured; and what is different between two such tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partita.commands.audience import TERMINAL
from partita.commands.outputs import STDOUT, Sink, claim_output, data_files
from partita.commands.terminal import note, stdout_console, write_stdout
from partita.errors import INTERRUPTED, UsageError
from partita.files import Output
from partita.library.chain import read_by
from partita.library.supporting import SupportOptions, measure_support
from partita.partition_reports.render.view import load_view

if TYPE_CHECKING:
    from partita.support.records import SupportTable

VIEWS = "partita.support.views"
DIFF = "diff"
"""The word that asks for the difference of two tables."""


OPTIONS = {"json": "--out"}
"""Of the views, those whose option is called otherwise."""


@dataclass(frozen=True, slots=True)
class Shown:
    """How the table is shown: on stdout as text or JSON, and in files by view."""

    as_json: bool
    files: tuple[tuple[str, Path], ...]
    """(view, file)."""


def run(options: SupportOptions, shown: Shown) -> int:
    """Measure, show, and return the exit code. Raises UsageError, PackageError, ProviderError."""
    on_stdout = [view for view, path in shown.files if path == STDOUT]
    if len(on_stdout) + shown.as_json > 1:
        raise UsageError("two views would go to stdout; give one of them a file")
    given = () if options.model is None else (options.model, *data_files(options.model))
    reads = read_by(options.where, *given)
    sinks = [
        (view, claim_output(path, "support table", reads, option=OPTIONS.get(view, f"--{view}")))
        for view, path in shown.files
    ]
    found, interrupted = measure_support(options, TERMINAL)
    write(found, sinks)
    if shown.as_json:
        write_stdout(load_view("json", VIEWS).to_text(found))
    elif not on_stdout:
        from partita.support.views.text import render

        render(found, stdout_console())
    return INTERRUPTED if interrupted else 0


def diff(files: Sequence[str], *, as_json: bool) -> int:
    """Show what is different in the second of two tables, and return the exit code. Raises UsageError, ReportError."""
    if len(files) != 2:
        raise UsageError("support diff compares two tables: partita support diff A.json B.json")
    from partita.partition_reports import storage
    from partita.support.diff import compare
    from partita.support.records import SCHEMA, SupportTable
    from partita.support.views._diff import render

    first, second = (storage.read_one_of(Path(file), {SCHEMA: SupportTable}) for file in files)
    found = compare(first, second, names=(files[0], files[1]))
    if as_json:
        write_stdout(storage.to_json(found))
    else:
        render(found, stdout_console())
    return 0


def model_in(words: Sequence[str]) -> Path | None:
    """The only word, where it is an ONNX file or the folder of a package, and not the name of an operator."""
    if len(words) != 1:
        return None
    return Path(words[0]) if words[0].endswith(".onnx") or Path(words[0]).is_dir() else None


def write(found: SupportTable, sinks: Sequence[tuple[str, Sink]]) -> None:
    """The table in each view that was asked for in a file."""
    for view, sink in sinks:
        sink.write(load_view(view, VIEWS).to_text(found))
        if isinstance(sink, Output):
            note(f"support table: {sink.path}")
