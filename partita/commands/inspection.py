"""`partita inspect`, `plan`, `providers` and `doctor`: a model, or this machine, without running anything."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from partita.commands.arguments import Showing, Stdout, prepare
from partita.commands.results import DoctorResult
from partita.commands.terminal import TERMINAL, Bars, print_record, write_stdout
from partita.errors import ReportCheckError
from partita.library.inspecting import run_inspection
from partita.library.place import support
from partita.options.inspection import DoctorCommand, InspectCommand, PlanCommand, ProvidersCommand
from partita.options.reports import DiffCommand
from partita.partition_reports.render.show import load_view
from partita.runtime.cpu import cpu_name
from partita.runtime.machine import PACKAGES


def doctor(options: DoctorCommand) -> None:
    """Collect the facts and print them. Imports none of the packages whose versions it prints."""
    result = DoctorResult(
        python=platform.python_version(),
        operating_system=platform.platform(),
        cpu=cpu_name(),
        logical_cores=os.cpu_count() or 1,
        packages={name: found.version for name in PACKAGES for found in [*metadata.distributions(name=name)][:1]},
        machine=support.providers(provider_libraries=options.provider_libraries or {}),
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
    showing = prepare(options, "" if options.against is None else DiffCommand.VIEWS)
    showing.show(run_inspection(options))


def providers(options: ProvidersCommand) -> None:
    """Check every provider and show the results. Raises UsageError for an unusable library."""
    showing = prepare(options)
    showing.show(support.providers(provider_libraries=options.provider_libraries or {}, measure=options.measure))
