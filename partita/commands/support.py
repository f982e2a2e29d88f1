"""`partita support`: what a provider takes, measured; and what is different between two such tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.commands.audience import TERMINAL
from partita.commands.outputs import STDOUT, claim_output, data_files
from partita.commands.showing import Asked, Showing, prepare
from partita.errors import INTERRUPTED, UsageError
from partita.library.chain import read_by
from partita.library.supporting import SupportOptions, measure_support
from partita.partition_reports.render.view import load_view

VIEWS = "partita.support.views"
DIFF_VIEWS = "partita.support.diff.views"
DIFF = "diff"
"""The word that asks for the difference of two tables."""
OPTIONS = {"json": "--out"}
"""Of the views, those whose option for a file is called otherwise."""


@dataclass(frozen=True, slots=True)
class Shown:
    """How a table or a difference is shown: on stdout, and in files by view."""

    view: str
    """On stdout, where none of the files is that."""
    files: tuple[tuple[str, Path], ...]
    """(view, file)."""


@dataclass(frozen=True, slots=True)
class Places:
    """Every view that was asked for, and where it goes."""

    showings: tuple[Showing, ...]

    @classmethod
    def of(cls, shown: Shown, folder: str, what: str, reads: Iterable[Path]) -> Places:
        """Claim all of them. Raises UsageError when two would go to stdout."""
        reads = tuple(reads)
        on_stdout = [view for view, path in shown.files if path == STDOUT]
        if len(on_stdout) + (shown.view != "text") > 1:
            raise UsageError("two views would go to stdout; give one of them a file")
        places = [path for _, path in shown.files]
        found = [
            Showing(
                load_view(view, folder),
                claim_output(path, what, (*reads, *places[:index]), option=OPTIONS.get(view, f"--{view}")),
                what,
            )
            for index, (view, path) in enumerate(shown.files)
        ]
        return cls((*found, *(() if on_stdout else (prepare(Asked(shown.view), folder),))))

    def show(self, record: Any) -> None:
        """The record in each view."""
        for showing in self.showings:
            showing.show(record)


def run(options: SupportOptions, shown: Shown) -> int:
    """Measure, show, and return the exit code. Raises UsageError, PackageError, ProviderError."""
    given = () if options.model is None else (options.model, *data_files(options.model))
    places = Places.of(shown, VIEWS, "support table", read_by(options.where, *given))
    found, interrupted = measure_support(options, TERMINAL)
    places.show(found)
    return INTERRUPTED if interrupted else 0


def diff(files: Sequence[str], shown: Shown) -> int:
    """Show what is different in the second of two tables, and return the exit code. Raises UsageError, ReportError."""
    if len(files) != 2:
        raise UsageError("support diff compares two tables: partita support diff A.json B.json")
    from partita.partition_reports import storage
    from partita.support.diff.compare import compare
    from partita.support.records import SCHEMA, SupportTable

    paths = [Path(file) for file in files]
    places = Places.of(shown, DIFF_VIEWS, "difference of support tables", paths)
    first, second = (storage.read_one_of(path, {SCHEMA: SupportTable}) for path in paths)
    places.show(compare(first, second, names=(files[0], files[1])))
    return 0


def model_in(words: Sequence[str]) -> Path | None:
    """The only word, where it is an ONNX file or the folder of a package, and not the name of an operator."""
    if len(words) != 1:
        return None
    return Path(words[0]) if words[0].endswith(".onnx") or Path(words[0]).is_dir() else None
