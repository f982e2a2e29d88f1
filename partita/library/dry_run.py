"""CUDA without a GPU: a model placed over stub CUDA libraries, which the environment of its process points at."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from partita.errors import PartitaError, ProviderError
from partita.library.audience import QUIET, Audience
from partita.library.chain import Target
from partita.library.crashes import NONE_CRASHED, Crashed
from partita.options import PlaceOptions
from partita.partition_reports.records import Report
from partita.partition_reports.request_records import DryRunFacts

if TYPE_CHECKING:
    from partita.providers.cuda_dry_run.devices import Device

SECONDS = 1800.0
"""Limit of a dry run: it computes nothing on the device, but loading and optimising a large model takes its time."""
OVER_THE_GRAPH = frozenset({"subgraph_rejected", "dynamic_shape"})
"""Reasons with which a provider that does start is left out: a report on the graph is what was asked for then."""
NOT_REAL = (
    "values: memory of the device reads as zeros, so no output means anything",
    "times: nothing is computed on a device, so none is given",
    "sizes that follow from values: unknown, and marked so",
    "memory use, and what depends on how much memory is free",
    "the device profile: it answers questions about the device; no placement was seen to depend on it",
)


def simulated_device(options: PlaceOptions) -> Device:
    """The device of a dry run. Raises UsageError for an unknown one."""
    from partita.providers.cuda_dry_run.devices import DEFAULT_DEVICE, device

    return device(DEFAULT_DEVICE if options.device is None else options.device)


def dry_environment(options: PlaceOptions) -> dict[str, str]:
    """Environment variables of a process whose loader finds the stub libraries.

    Raises ProviderError when they cannot be built.
    """
    from partita.providers.cuda_dry_run.standins import child_environment, prepare, provider_library

    device = simulated_device(options)
    return child_environment(prepare(provider_library()), device, os.environ)


def place_dry(
    options: PlaceOptions, target: Target, *, crashed: Crashed = NONE_CRASHED, audience: Audience = QUIET
) -> tuple[Report, PartitaError | None]:
    """Place a model in this process, which has the environment of `dry_environment`; see `place_run.place`.

    Raises ProviderError when the stub libraries are not those that are loaded, before or after the run, and when the
    provider does not start over them.
    """
    from partita.library.place_run import place
    from partita.providers.cuda_dry_run.standins import ensure_child, prepare, provider_library, runtime_version

    build, library, device = ensure_child(), provider_library(), simulated_device(options)
    played = DryRunFacts(
        device=device.key,
        device_name=device.name,
        compute_capability=".".join(map(str, device.capability)),
        memory_bytes=device.memory_bytes,
        multiprocessors=device.multiprocessors,
        provider_library=library.name,
        onnxruntime_version=runtime_version(library),
        cuda_version=prepare(library).cuda_version,
        stand_ins=build,
        not_real=NOT_REAL,
        graph_capture=None,
    )
    report, error = place(options, target, played, audience=audience, crashed=crashed)
    ensure_child()
    if not crashed:
        _check_started(report)
    return report, error


def _check_started(report: Report) -> None:
    """Raise ProviderError when the provider of a dry run did not start."""
    first = report.chain[0]
    if first.status != "active" and first.reason not in OVER_THE_GRAPH:
        raise ProviderError(
            f"dry run: {first.provider} did not start over the stub libraries: {first.reason}: {first.evidence}"
        )
