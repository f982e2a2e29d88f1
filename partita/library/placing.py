"""Where the nodes of any model run, as a function."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from partita.errors import PartitaError
from partita.foreign.folder import Choice
from partita.library.audience import QUIET, Audience
from partita.library.chain import Target, read_chain_options
from partita.library.crashes import despite_crashes
from partita.library.edge import public
from partita.library.jobs import run_job
from partita.library.loading import Process, in_child
from partita.library.place_options import PROBE_SECONDS, RUNS, PlaceOptions, check_chain, check_options
from partita.library.report import Report
from partita.library.where import Libraries, ProviderOptions, Providers, where
from partita.partition_reports import records

Sizes: TypeAlias = Mapping[str, int | Sequence[int]]
"""Sizes of an input, `{"x": (1, 3, 224, 224)}`, or of a symbolic dimension, `{"batch": 1}`."""


class PlacementError(PartitaError):
    """The model was placed, and a run of it failed. `report` has where its nodes are; the cause has what failed."""

    def __init__(self, error: PartitaError, report: Report) -> None:
        super().__init__(error.said, where=error.where, remedy=error.remedy)
        self.report = report


@public
def place(
    model: str | os.PathLike[str],
    providers: Providers | None = None,
    *,
    provider_options: ProviderOptions | None = None,
    provider_libraries: Libraries | None = None,
    pins: Sequence[str] = (),
    shapes: Sizes | None = None,
    inputs: Libraries | None = None,
    runs: int = RUNS,
    threads: int | None = None,
    dry_run: bool = False,
    device: str | None = None,
    graph_capture: bool = False,
    probe_seconds: float = PROBE_SECONDS,
    run_seconds: float | None = None,
    process: Process = "auto",
    variant: str | None = None,
    contract: str | os.PathLike[str] | None = None,
    max_length: int | None = None,
) -> Report:
    """The partition report of any ONNX model, package or folder of another exporter, without a generation.

    `providers`, `provider_options`, `provider_libraries`, `pins`, `threads` and `process` are those of `load`.
    `shapes`: sizes of inputs or of symbolic dimensions. `inputs`: .npy files with values of inputs; others are made up.
    `runs`: session runs per phase. `dry_run`: CUDA without a GPU, over stub libraries, simulating the GPU
    `device`; `graph_capture`: whether CUDA graphs could be captured there. `probe_seconds`: longest time for
    experiments on nodes that fell back; 0: none. `run_seconds`: longest time for the runs of an ONNX file; None: 120.
    `variant`, `contract` and `max_length` are those of `load`.

    Raises ArgumentError, PackageError, ResourceError, InstallationError, ProviderError when the chain cannot be
    honoured, and PlacementError, which has the report, when a run failed.
    """
    given = where(providers, provider_options, provider_libraries, pins, threads)
    options = PlaceOptions(
        model=Path(model),
        where=given,
        shapes=tuple(f"{name}={_sizes(sizes)}" for name, sizes in (shapes or {}).items()),
        values=tuple(f"{name}={os.fspath(path)}" for name, path in (inputs or {}).items()),
        runs=runs,
        dry_run=dry_run,
        device=device,
        graph_capture=graph_capture,
        probe_seconds=probe_seconds,
        run_seconds=run_seconds,
        choice=Choice(variant, None if contract is None else Path(contract), max_length),
    )
    check_options(options)
    target = read_chain_options(given)
    check_chain(options, target.asked_names)
    report, error = place_model(options, target, process=process)
    if report.interrupted:
        raise KeyboardInterrupt
    if error is not None:
        raise PlacementError(error, Report.of(report)) from error
    return Report.of(report)


def place_model(
    options: PlaceOptions, target: Target, *, process: Process = "auto", audience: Audience = QUIET
) -> tuple[records.Report, PartitaError | None]:
    """The report, and why a run failed. A model over which native code crashes is placed in other ways; see `crashes`.

    The first Ctrl-C ends what is going on, which the report says. A failed run of a dry run is a note in its report.
    Raises KeyboardInterrupt when there was nothing to report yet, ProviderError, and what `place_run.place` raises.
    """
    work, environment, timeout = "partita.library.place_run:place", None, None
    in_worker = in_child(target, process)
    if options.dry_run:
        from partita.library.dry_run import SECONDS, dry_environment

        work, environment, timeout = "partita.library.dry_run:place_dry", dry_environment(options), SECONDS
        in_worker = True
    report, error = despite_crashes(
        target.chain,
        lambda crashed: run_job(
            work,
            options,
            target,
            chain=target.chain,
            in_worker=in_worker,
            audience=audience,
            environment=environment,
            timeout=timeout,
            patient=True,
            crashed=crashed,
        ),
        package=options.is_package,
    )
    return report, None if options.dry_run else error


def _sizes(sizes: int | Sequence[int]) -> str:
    return str(sizes) if isinstance(sizes, int) else ",".join(map(str, sizes))
