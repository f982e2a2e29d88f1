"""`partita support`: measured operator support of a provider, and differences between two tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from partita.commands.audience import TERMINAL
from partita.commands.outputs import STDOUT, RequestedView, Showing, data_files, prepare, requested_view, reserve_output
from partita.errors import INTERRUPTED, UsageError
from partita.library.chain import chain_of, read_by
from partita.library.place.support import chain_options, measure_support
from partita.observations.text_format import listing
from partita.options.fields import describe_fields
from partita.options.placement import SupportCommand
from partita.partition_reports.render.show import load_view

VIEWS = "partita.support.sections"
DIFF_VIEWS = "partita.compare.document"
DIFF = "diff"
"""First argument of a comparison of two tables."""
OPTIONS = {"json": "--out"}
"""View -> its option for a file, if it has another name."""


def _views(options: SupportCommand, folder: str, what: str, reads: Iterable[Path]) -> list[Showing]:
    """Every requested view with its output. Raises UsageError if two would go to stdout."""
    reads, view = tuple(reads), requested_view(replace(options, out=None)).view
    given = {"json": options.out, "markdown": options.markdown, "html": options.html}
    files = {name: Path(path) for name, path in given.items() if path is not None}
    on_stdout = [name for name, path in files.items() if path == STDOUT]
    if len(on_stdout) + (view != "text") > 1:
        raise UsageError("two views are written to stdout; give a file for one of them")
    places, found = list(files.values()), []
    for index, (name, path) in enumerate(files.items()):
        option = OPTIONS.get(name, f"--{name}")
        sink = reserve_output(path, what, (*reads, *places[:index]), option=option)
        found.append(Showing(load_view(name, folder), sink, what))
    return found if on_stdout else [*found, prepare(RequestedView(view), folder)]


def run(options: SupportCommand) -> int:
    """Measure, show, and return the exit code. Raises UsageError, PackageError, ProviderError, ReportError."""
    words: tuple[str, ...] = tuple(options.operators or ())
    if words and words[0] == DIFF:
        return _diff(words[1:], options)
    model = None if options.model is None else Path(options.model)
    only = next(iter(words), "")
    if model is None and len(words) == 1 and (only.endswith(".onnx") or Path(only).is_dir()):
        words, model = (), Path(only)
    if [bool(words), model is not None, options.everything].count(True) != 1:
        raise UsageError("name operators (e.g. Cast com.microsoft:MatMulNBits), a model, or --all; use exactly one")
    given = () if model is None else (model, *data_files(model))
    views = _views(options, VIEWS, "support table", read_by(chain_of(chain_options(options)), *given))
    found, interrupted = measure_support(replace(options, operators=words, model=model), TERMINAL)
    for view in views:
        view.show(found)
    return INTERRUPTED if interrupted else 0


def _diff(files: Sequence[str], options: SupportCommand) -> int:
    """Show the differences between two tables, and return the exit code. Raises UsageError, ReportError."""
    shown = ("operators", "out", "markdown", "html", "view", "as_json")
    given = [each for each in describe_fields(SupportCommand) if each.name not in shown]
    refused = [each.flag for each in given if getattr(options, each.name) != each.field.default]
    if refused:
        raise UsageError(f"support diff compares two tables written by --out; omit {listing(refused)}")
    if len(files) != 2:
        raise UsageError("support diff needs two tables: partita support diff A.json B.json")
    from partita.compare.packages import compare_tables
    from partita.partition_reports import storage
    from partita.support.records import SCHEMA, SupportTable

    paths = [Path(file) for file in files]
    views = _views(options, DIFF_VIEWS, "difference of support tables", paths)
    first, second = (storage.read_one_of(path, {SCHEMA: SupportTable}) for path in paths)
    for view in views:
        view.show(compare_tables(first, second, names=(files[0], files[1])))
    return 0
