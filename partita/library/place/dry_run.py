"""Dry runs: CUDA placement without a GPU, with stub CUDA libraries in the worker process's environment."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from partita.errors import ProviderError
from partita.observations.text_format import listing, plural
from partita.partition_reports.dry_run import blocking_nodes
from partita.partition_reports.records import Report
from partita.partition_reports.request_records import DryRunFacts, GraphCapture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from partita.providers.resolve import Resolution
    from partita.runtime.place.onnx_model import OnnxModel

SECONDS = 1800.0
"""Time limit of a dry run, which may load and optimise a large model."""
OVER_THE_GRAPH = frozenset({"subgraph_rejected", "dynamic_shape"})
"""Reasons for leaving out a provider that does start; explained in the report."""
CAPTURE_OPTION = "enable_cuda_graph"
NOT_REAL = (
    "values: device memory reads as zeros, so outputs are meaningless",
    "times: nothing is computed on a device, so there are none",
    "sizes that depend on values: unknown, and marked so",
    "memory use, and everything that depends on free memory",
    "the device profile: it sets device properties, which have not been seen to change the placement",
)


def dry_environment(name: str | None = None) -> tuple[dict[str, str], str]:
    """Environment of a process that simulates a GPU, and the name of the GPU. Raises ProviderError, UsageError."""
    from partita.providers.cuda_dry_run.devices import DEFAULT_DEVICE, device
    from partita.providers.cuda_dry_run.stub_build import child_environment, prepare, provider_library

    simulated = device(DEFAULT_DEVICE if name is None else name)
    return child_environment(prepare(provider_library()), simulated, os.environ), simulated.name


def dry_run_facts(name: str | None) -> DryRunFacts:
    """The simulated device and its libraries. Raises ProviderError when this process has no stub libraries."""
    from partita.providers.cuda_dry_run.devices import DEFAULT_DEVICE, device
    from partita.providers.cuda_dry_run.stub_build import (
        CUDA_VERSION_TEXT,
        ensure_child,
        provider_library,
        runtime_version,
    )

    build, library, simulated = ensure_child(), provider_library(), device(DEFAULT_DEVICE if name is None else name)
    return DryRunFacts(
        device=simulated.key,
        device_name=simulated.name,
        compute_capability=".".join(map(str, simulated.capability)),
        memory_bytes=simulated.memory_bytes,
        multiprocessors=simulated.multiprocessors,
        provider_library=library.name,
        onnxruntime_version=runtime_version(library),
        cuda_version=CUDA_VERSION_TEXT,
        stub_build=build,
        not_real=NOT_REAL,
        graph_capture=None,
    )


def check_dry_run(report: Report, *, started: bool) -> None:
    """Raise ProviderError when the stub libraries were not used; with `started`, also when the provider is inactive."""
    from partita.providers.cuda_dry_run.stub_build import ensure_child

    ensure_child()
    first = report.chain[0]
    if started and first.status != "active" and first.reason not in OVER_THE_GRAPH:
        raise ProviderError(
            f"dry run: {first.provider} did not start over the stub libraries: {first.reason}: {first.evidence}"
        )


def with_capture(
    report: Report, chain: Sequence[Resolution], models: Mapping[str, OnnxModel], threads: int | None
) -> Report:
    """The report of a dry run with the graph capture result of each ONNX file."""
    assert report.dry_run is not None
    verdicts = tuple(_try_capture(report, model, chain, threads) for model in models.values())
    return report.model_copy(update={"dry_run": report.dry_run.model_copy(update={"graph_capture": verdicts})})


def _try_capture(report: Report, model: OnnxModel, chain: Sequence[Resolution], threads: int | None) -> GraphCapture:
    """Whether CUDA graphs of a session could be captured: ONNX Runtime opens it, and no node of a run prevents it.

    ONNX Runtime refuses control flow and nodes outside the device. It does not check copies that it inserts later, or
    kernels that synchronise with the host. It allows assumed shape computations with a warning.
    """
    from partita.runtime.ort.errors import one_line
    from partita.runtime.ort.session import NativeFailureError, open_native
    from partita.runtime.ort.session_options import Opening

    file = model.path.name
    phases = [phase for phase in report.phases if phase.file == file]
    phase = next((phase for phase in phases if phase.name == "decode"), phases[-1])
    blocking = blocking_nodes(phase, report.chain[0].provider)
    first, *others = [entry for entry in chain if entry.status == "active"]
    capturing = replace(first, options={**first.options, CAPTURE_OPTION: "1"})
    try:
        session = open_native(model.path, (capturing, *others), Opening(threads=threads, model=model.to_bytes()))
    except NativeFailureError as failure:
        return GraphCapture(file=file, is_accepted=False, evidence=one_line(str(failure)), blocking=blocking)
    with closing(session):
        warned = [line for line in session.log if "graph capture" in line.lower()]
    evidence = f"ONNX Runtime opens the session with {CAPTURE_OPTION}=1"
    if warned:
        evidence = one_line(warned[0].rpartition("] ")[2])
    evidence += "; capturing a run may still fail"
    fatal = Counter(node.cause_text for node in blocking if node.cause != "other_provider" or not warned)
    if fatal:
        reasons = listing(f"{plural(count, 'node')} ({reason})" for reason, count in fatal.items())
        evidence = f"ONNX Runtime opens the session, but the capturing run would fail: {reasons}"
    return GraphCapture(file=file, is_accepted=not fatal, evidence=evidence, blocking=blocking)
