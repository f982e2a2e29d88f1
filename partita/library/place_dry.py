"""Places a model in a child process: over stub CUDA libraries, or because a provider's native code may crash."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.errors import PartitaError, ProviderError
from partita.files import temporary_directory
from partita.library.chain import read_chain_options
from partita.library.crashes import CRASHES, Crashed, CrashError, despite_crashes, foreign
from partita.library.crossing import raise_told, rebuilt
from partita.library.place_options import PlaceOptions
from partita.partition_reports import storage
from partita.partition_reports.records import Report
from partita.providers.base import Provider
from partita.runtime.process.children import run_patiently
from partita.spelling import reader

if TYPE_CHECKING:
    from partita.providers.cuda_dry_run.devices import Device

CHILD = "partita.library.place_child"
CHILD_SECONDS = 1800.0
"""A dry run computes nothing on the device, but loading and optimising a large model takes its time."""


def place_dry(options: PlaceOptions) -> tuple[Report, bool]:
    """Place the model over stub CUDA libraries, in a child process; whether Ctrl-C cut it short.

    A run that fails there says nothing about the model, and is a note in the report. Ctrl-C is the child's to handle:
    it ends the runs or the experiments, and the report has what there is. Raises ProviderError when the stubs
    cannot be built or the child crashes or hangs, KeyboardInterrupt when there was nothing to report yet, and whatever
    the child raises.
    """
    from partita.providers.cuda_dry_run.devices import DEFAULT_DEVICE, device
    from partita.providers.cuda_dry_run.standins import child_environment, prepare, provider_library

    played = device(DEFAULT_DEVICE if options.device is None else options.device)
    stand_ins = prepare(provider_library())
    environment = child_environment(stand_ins, played, os.environ)
    report, _, interrupted = place_in_child(options, played_as(played), environment)
    return report, interrupted


def played_as(played: Device) -> dict[str, Any]:
    """What the child of a dry run is told of the device that it has, and of the stubs. Raises ProviderError."""
    from partita.providers.cuda_dry_run.standins import prepare, provider_library, runtime_version

    library = provider_library()
    return {
        "device": played.key,
        "device_name": played.name,
        "compute_capability": ".".join(map(str, played.capability)),
        "memory_bytes": played.memory_bytes,
        "multiprocessors": played.multiprocessors,
        "provider_library": library.name,
        "onnxruntime_version": runtime_version(library),
        "cuda_version": prepare(library).cuda_version,
    }


def place_in_child(
    options: PlaceOptions, played: Mapping[str, Any] | None, environment: Mapping[str, str]
) -> tuple[Report, PartitaError | None, bool]:
    """Place a model in a child process: the report, why a run failed, and whether Ctrl-C cut it short.

    `played`: the device of a dry run. A provider that crashes over the model is left out of a second try. Raises as
    `place_dry` does.
    """
    chain = read_chain_options(options.where).chain
    return despite_crashes(
        chain, lambda crashed: _place_once(options, played, environment, crashed, chain), package=options.is_package
    )


def _place_once(
    options: PlaceOptions,
    played: Mapping[str, Any] | None,
    environment: Mapping[str, str],
    crashed: Crashed,
    chain: Sequence[Provider],
) -> tuple[Report, PartitaError | None, bool]:
    """One try of `place_in_child`, without the providers that crashed. Raises CrashError when there is a crash."""
    with temporary_directory() as folder:
        path = Path(folder) / "report.json"
        outcome = run_patiently(
            CHILD,
            {
                "options": options.to_json(),
                "report": str(path),
                "played": played,
                "reader": reader(),
                "crashed": dict(crashed),
            },
            timeout_seconds=CHILD_SECONDS,
            # What a crash leaves behind goes with the folder.
            environment={**environment, "TMPDIR": folder},
        )
        if outcome.result is None:
            last = outcome.log[-1] if outcome.log else "none"
            if outcome.signal in CRASHES and foreign(chain):
                raise CrashError(chain, f"ended the process: it {outcome.ended}; last line: {last}")
            what = "dry run" if played is not None else "place"
            raise ProviderError(
                f"{options.model}: {what}: initialisation_failed: the process was {outcome.ended}; last line: {last}"
            )
        interrupted = bool(outcome.result.get("interrupted"))
        if interrupted and not path.is_file():
            raise KeyboardInterrupt
        raise_told(outcome.result.get("error"))
        failed = outcome.result.get("failed")
        return storage.read(path), rebuilt(failed) if failed else None, interrupted
