"""`partita place`, `drift`, `support`, `inspect`, `plan`, `providers` and `doctor`: a model, and this machine.

A result is printed and written first; then a failed run, a limit or a tolerance, or Ctrl-C ends the command.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from partita.commands.arguments import Showing, Stdout, prepare, reserve_report, show_and_write
from partita.commands.terminal import TERMINAL, Bars, note, print_record, print_target_notes, write_stdout
from partita.errors import INTERRUPTED, ParityError, ProviderError, ReportCheckError, UsageError
from partita.library.chain import not_used
from partita.library.place.placement import place_model, read_place
from partita.library.place.support import measure_support
from partita.library.place.support import providers as check_providers
from partita.library.run_report import limits_error
from partita.options.fields import input_paths
from partita.options.inspection import DoctorCommand, InspectCommand, PlanCommand, ProvidersCommand
from partita.options.placement import DriftCommand, PlaceCommand, SupportCommand
from partita.options.reports import DiffCommand
from partita.partition_reports.render.show import REPORT_VIEWS, load_view
from partita.runtime.cpu import cpu_name
from partita.runtime.machine import PACKAGES


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
    from partita.library.drifting import measure_drift, read_sides

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


def doctor(options: DoctorCommand) -> None:
    """Collect the facts and print them. Imports none of the packages whose versions it prints."""
    from partita.commands.results import DoctorResult

    result = DoctorResult(
        python=platform.python_version(),
        operating_system=platform.platform(),
        cpu=cpu_name(),
        logical_cores=os.cpu_count() or 1,
        packages={name: found.version for name in PACKAGES for found in [*metadata.distributions(name=name)][:1]},
        machine=check_providers(provider_libraries=options.provider_libraries or {}),
    )
    if options.as_json:
        print_record(result)
        return
    facts = {
        "partita": result.machine.partita_version,
        "python": result.python,
        "system": result.operating_system,
        "cpu": f"{result.cpu}, {result.logical_cores} logical cores",
        **dict.fromkeys(PACKAGES, "not installed"),
        **result.packages,
    }
    wide = max(map(len, facts))
    write_stdout("".join(f"{name:<{wide}}  {value}\n" for name, value in facts.items()) + "\n")
    Showing(load_view("text", ProvidersCommand.VIEWS), Stdout()).show(result.machine)


def plan(options: PlanCommand) -> None:
    """Plan and show. Then raises ReportCheckError if the model does not fit."""
    from partita.capacity.records import headline, largest
    from partita.library.planning import make_plan

    showing = prepare(options)
    with Bars() as bars:
        found = make_plan(options, bars, TERMINAL)
    showing.show(found)
    if not found.fits:
        raise ReportCheckError(f"{found.model}: {headline(found)}; largest that fit: {largest(found)}")


def inspect(options: InspectCommand) -> None:
    """Inspect and show. Problems of the folder are findings, not errors. Raises UsageError, PackageError."""
    from partita.library.inspecting import run_inspection

    showing = prepare(options, "" if options.against is None else DiffCommand.VIEWS)
    showing.show(run_inspection(options))


def providers(options: ProvidersCommand) -> None:
    """Check every provider and show the results. Raises UsageError for an unusable library."""
    showing = prepare(options)
    showing.show(check_providers(provider_libraries=options.provider_libraries or {}, measure=options.measure))
