"""`partita place`, `drift` and `support`: where nodes run and why, which are wrong, and which a provider can run.

A result is printed and written first; then a failed run, a limit or a tolerance, or Ctrl-C ends the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from partita.commands.outputs import (
    STDOUT,
    Showing,
    open_sink,
    prepare,
    refuse_two_on_stdout,
    requested_view,
    reserve_output,
    show_and_write,
)
from partita.commands.terminal import TERMINAL, note, print_target_notes
from partita.errors import INTERRUPTED, ParityError, ProviderError, UsageError
from partita.library.chain import not_used
from partita.library.drifting import measure_drift, read_sides
from partita.library.place.placement import place_model, read_place
from partita.library.place.support import measure_support
from partita.library.run_report import limits_error
from partita.observations.text_format import listing
from partita.options.fields import describe_fields, input_paths
from partita.options.placement import DriftCommand, PlaceCommand, SupportCommand
from partita.options.reports import DiffCommand
from partita.partition_reports.render.show import REPORT_VIEWS, load_view


def run(options: PlaceCommand) -> int:
    """Place the model, print and write the report; returns the exit code.

    Raises UsageError, PackageError, ReportError, ResourceError, and ProviderError when the chain cannot be honoured or
    a limit is exceeded.
    """
    target, sink = read_place(options), None
    if options.full and options.as_json:
        raise UsageError("--full and --json select different views; keep one")
    if options.report is not None:
        report_file = Path(options.report)
        refuse_two_on_stdout(report_file, as_json=options.as_json)
        sink = reserve_output(report_file, "report", input_paths(options), option="--report")
    print_target_notes(target)
    report, error = place_model(options, target, audience=TERMINAL)
    for entry in report.chain:
        if entry.status != "active":
            note(f"note: {not_used(entry.provider, entry)}")
    view = "json" if options.as_json else "text" if options.full else "brief"
    show_and_write(report, load_view(view, REPORT_VIEWS), sink, "report")
    error = error or limits_error(report)
    if error is not None:
        raise error
    return INTERRUPTED if report.interruptions else 0


def drift(options: DriftCommand) -> int:
    """Compare and show. Then raises ParityError on a difference, ProviderError if no node ran on the provider."""
    showing = prepare(options)
    sides = read_sides(options)
    print_target_notes(sides[0])
    found = measure_drift(options, sides, audience=TERMINAL)
    showing.show(found)
    if found.is_within and found.unused_because is None:
        return 0
    from partita.drift.document import headline

    kind = ProviderError if found.is_within else ParityError
    raise kind(f"{options.model}: {headline(found)}")


DIFF = "diff"
"""First argument of a comparison of two tables."""


def _views(options: SupportCommand, folder: str, kind: str, reads: Sequence[Path]) -> list[Showing]:
    """Every requested view with its output. Raises UsageError if two would go to stdout."""
    view = requested_view(options)
    given = {"json": options.out, "markdown": options.markdown, "html": options.html}
    files = {name: Path(path) for name, path in given.items() if path is not None}
    on_stdout = list(files.values()).count(STDOUT)
    if on_stdout + (view != "text") > 1:
        raise UsageError("two views are written to stdout; give a file for one of them")
    found = []
    for name, path in files.items():
        option = "--out" if name == "json" else f"--{name}"
        found.append(Showing(load_view(name, folder), reserve_output(path, kind, reads, option=option), kind))
        reads = (*reads, path)
    return found if on_stdout else [*found, open_sink(load_view(view, folder), None, ())]


def support(options: SupportCommand) -> int:
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
    options = replace(options, operators=words, model=model)
    views = _views(options, options.VIEWS, "support table", input_paths(options))
    found, interrupted = measure_support(options, TERMINAL)
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
    views = _views(options, DiffCommand.VIEWS, "difference of support tables", paths)
    first, second = (storage.read_one_of(path, {SCHEMA: SupportTable}) for path in paths)
    for view in views:
        view.show(compare_tables(first, second, names=(files[0], files[1])))
    return 0
