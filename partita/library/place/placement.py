"""Placement of any model: which provider each node runs on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from partita.check.requirements import Limits, check_limits
from partita.errors import PartitaError, UsageError
from partita.foreign.folder import Choice
from partita.foreign.model_package import is_folder
from partita.library.api import QUIET, Audience, from_fields
from partita.library.chain import Target, read_chain
from partita.library.engine.jobs import despite_crashes, run_job
from partita.library.loading import in_child
from partita.library.report import Report
from partita.options.placement import PlaceOptions
from partita.partition_reports import records
from partita.providers.cuda import PROVIDER as CUDA

DRY_RUN_SECONDS = 1800.0
"""Time limit of a dry run, which may load and optimise a large model."""


class PlacementError(PartitaError):
    """The model was placed, but a run failed. `report` has the placement; the cause is the error of the run."""

    def __init__(self, error: PartitaError, report: Report) -> None:
        super().__init__(error.message, path=error.path, remedy=error.remedy)
        self.report = report


@from_fields(PlaceOptions)
def place(options: PlaceOptions) -> Report:
    """The partition report of any ONNX model, package or foreign folder, without a generation.

    Raises ArgumentError, PackageError, ResourceError, InstallationError, ProviderError when the chain cannot be
    honoured, and PlacementError, which has the report, when a run failed or a limit is exceeded.
    """
    from partita.library.run_report import limits_error

    target = read_place(options)
    report, error = place_model(options, target)
    if report.interruptions:
        raise KeyboardInterrupt
    error = error or limits_error(report)
    if error is not None:
        raise PlacementError(error, Report.of(report)) from error
    return Report.of(report)


def read_place(options: PlaceOptions) -> Target:
    """The chain of a placement, after checking every option that needs nothing loaded. Raises UsageError."""
    if is_folder(Path(options.model)):
        of_files = {
            "shapes": "the sizes of a package are in its manifest",
            "inputs": "a package is run on dummy tokens",
            "run_seconds": "runs of a package have no time limit",
        }
        for name, reason in of_files.items():
            if getattr(options, name):
                raise UsageError(f"`{name}` is for ONNX files; {reason}")
    else:
        choice = Choice.of(options)
        (replace(choice, variant=None) if Path(options.model).is_dir() else choice).refuse_for_file()
    if options.device is not None and not options.dry_run:
        raise UsageError("`device` needs a dry run; add `dry_run=True`")
    if options.dry_run and options.providers is None:
        raise UsageError("`dry_run=True` needs `providers=cuda`, or cuda,cpu: only CUDA can be placed without a device")
    target = read_chain(options)
    check_limits(Limits.of(options), target.requested_names)
    if options.dry_run and target.chain[0].ort_name != CUDA.ort_name:
        raise UsageError(
            f"`dry_run=True` is for CUDA: `providers` must begin with cuda, not with {target.chain[0].ort_name}"
        )
    return target


def place_model(
    options: PlaceOptions, target: Target, *, audience: Audience = QUIET
) -> tuple[records.Report, PartitaError | None]:
    """The report, and the error of a run. After a crash of native code, it retries with less; see `jobs`.

    The first Ctrl-C ends the current stage and is noted in the report. In a dry run, an error is only noted in the
    report. Raises KeyboardInterrupt when there is nothing to report yet, ProviderError, and the errors of
    `place_run.place`.
    """
    environment, timeout = None, None
    if options.dry_run:
        from partita.providers.cuda_dry_run.stub_build import dry_environment

        (environment, _), timeout = dry_environment(options.device), DRY_RUN_SECONDS
    report, error = despite_crashes(
        target.chain,
        lambda crashed: run_job(
            "partita.library.place.place_run:place",
            options,
            target,
            chain=target.chain,
            in_worker=options.dry_run or in_child(target, options.process),
            audience=audience,
            environment=environment,
            timeout=timeout,
            patient=True,
            crashed=crashed,
        ),
        package=is_folder(Path(options.model)),
    )
    return report, None if options.dry_run else error
