"""`partita place`, `drift` and `support`: where nodes run and why, which are wrong, and which a provider can run.

A result is printed and written first; then a failed run, a limit or a tolerance, or Ctrl-C ends the command.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from partita.commands.arguments import prepare, reserve_report, show_and_write
from partita.commands.terminal import TERMINAL, note, print_target_notes
from partita.errors import INTERRUPTED, ParityError, ProviderError, UsageError
from partita.library.chain import not_used
from partita.library.drifting import measure_drift, read_sides
from partita.library.place.placement import place_model, read_place
from partita.library.place.support import measure_support
from partita.library.run_report import limits_error
from partita.options.fields import input_paths
from partita.options.placement import DriftCommand, PlaceCommand, SupportCommand
from partita.partition_reports.render.show import REPORT_VIEWS, load_view


def run(options: PlaceCommand) -> int:
    """Place the model, print and write the report; returns the exit code.

    Raises UsageError, PackageError, ReportError, ResourceError, and ProviderError when the chain cannot be honoured or
    a limit is exceeded.
    """
    target = read_place(options)
    if options.full and options.as_json:
        raise UsageError("--full and --json select different views; keep one")
    sink = reserve_report(options, input_paths(options))
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
    from partita.drift.records import headline

    kind = ProviderError if found.is_within else ParityError
    raise kind(f"{options.model}: {headline(found)}")


def support(options: SupportCommand) -> int:
    """Measure, show, and return the exit code. Raises UsageError, PackageError, ProviderError, ReportError."""
    words: tuple[str, ...] = tuple(options.operators or ())
    model = None if options.model is None else Path(options.model)
    only = next(iter(words), "")
    if model is None and len(words) == 1 and (only.endswith(".onnx") or Path(only).is_dir()):
        words, model = (), Path(only)
    if [bool(words), model is not None, options.everything].count(True) != 1:
        raise UsageError("name operators (e.g. Cast com.microsoft:MatMulNBits), a model, or --all; use exactly one")
    options = replace(options, operators=words, model=model)
    showing = replace(prepare(options), file_kind="support table")
    found, interrupted = measure_support(options, TERMINAL)
    showing.show(found)
    return INTERRUPTED if interrupted else 0
