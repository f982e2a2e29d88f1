"""Places one model in this process and builds the report; in a dry run this process uses stub libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.check.requirements import Limits
from partita.errors import PartitaError, ProviderError
from partita.foreign.folder import Choice, open_folder
from partita.foreign.model_package import choose_variant, is_folder
from partita.library.api import QUIET, Audience
from partita.library.chain import Target
from partita.library.engine.jobs import NONE_CRASHED, Crashed
from partita.library.place.probing import decode_sizes, refusals_explained, with_probes
from partita.library.run_report import option_texts, report_run
from partita.observations.facts import RunFacts
from partita.observations.names import EXPERIMENTS
from partita.options.placement import PlaceOptions
from partita.package.folder import sha256_of
from partita.partition_reports.records import DryRunFacts, ModelFacts, ModelInput, Report, Request
from partita.runtime.chain.advice import package_facts
from partita.runtime.chain.open_chain import chain_entry
from partita.runtime.chain.pins import parse_pins
from partita.runtime.machine import environment
from partita.runtime.ort.native_log import printed_kernels
from partita.runtime.place.inputs import Shape, read_inputs, size_text
from partita.runtime.place.onnx_model import OnnxModel, read_onnx
from partita.runtime.place.run_phases import (
    OpenOptions,
    PlacementFacts,
    RunInterruptedError,
    place_model,
    place_package,
)
from partita.runtime.place.tensor_types import fixed_shapes

RUN_SECONDS = 120.0
"""Default time limit of the runs of an ONNX file."""
NOT_CAPTURED = "graph capture: off in these runs; whether a run is replayed is unknown until `generate` counts replays"
NO_EXPERIMENTS = "no experiments were made: native code crashed in them as well"
FAILED_DRY = (
    "a failed run is no evidence in a dry run: values computed on the device read as zeros; sizes known "
    "only from a run are missing; all decisions before the run are valid"
)

OVER_THE_GRAPH = frozenset({"subgraph_rejected", "dynamic_shape"})
"""Reasons for leaving out a provider that does start; explained in the report."""
NOT_REAL = (
    "values: device memory reads as zeros, so outputs are meaningless",
    "times: nothing is computed on a device, so there are none",
    "sizes that depend on values: unknown, and marked so",
    "memory use, and everything that depends on free memory",
    "the device profile: it sets device properties, which have not been seen to change the placement",
)


Placed = tuple[PlacementFacts, Mapping[str, OnnxModel], Mapping[str, Mapping[str, Shape]], Mapping[str, Any]]
"""A placed model, its ONNX files and the shapes of their inputs by file name, and its facts as `package` or `model`."""


def place(
    options: PlaceOptions, target: Target, *, crashed: Crashed = NONE_CRASHED, audience: Audience = QUIET
) -> tuple[Report, PartitaError | None]:
    """The report of a model, and the error of a run. `crashed`: providers to skip.

    Raises PackageError, UsageError, ProviderError, ResourceError.
    """
    device = dry_run_facts(options.device) if options.dry_run else None
    where = OpenOptions(
        target.chain,
        target.options,
        parse_pins(target.pins, target.chain),
        options.threads,
        options.runs,
        RUN_SECONDS if options.run_seconds is None else options.run_seconds,
        dry_run=options.dry_run,
        crashed=crashed,
    )
    with printed_kernels(target.chain):
        place_any = _place_folder if is_folder(Path(options.model)) else _place_file
        placed, models, sizes, about = place_any(options, where, audience)
    error = placed.error
    interrupted, failed = isinstance(error, RunInterruptedError), error is not None
    seconds = 0.0 if interrupted or EXPERIMENTS in crashed else options.probe_seconds
    facts, resolutions = with_probes(placed.facts, placed.resolutions, models, sizes, seconds, audience)
    notes = [NO_EXPERIMENTS] if EXPERIMENTS in crashed else []
    notes += [NOT_CAPTURED] if any(entry.captures for entry in resolutions) else []
    if device is not None:
        facts = with_shapes(facts, models, sizes if "model" in about else {})
        notes += [FAILED_DRY] if failed and not interrupted else []
    elif failed and not interrupted:
        facts = replace(facts, failure=str(error).removeprefix(f"{options.model}: "))
    report = report_run(
        replace(facts, notes=(*facts.notes, *notes)),
        (*target.skipped, *map(chain_entry, resolutions)),
        environment(),
        _request_of(options, target),
        Limits.of(options),
        **about,
        device=device,
    )
    first = report.chain[0]
    if device is not None and not crashed and first.status != "active" and first.reason not in OVER_THE_GRAPH:
        raise ProviderError(
            f"dry run: {first.provider} did not start over the stub libraries: {first.reason}: {first.evidence}"
        )
    return report, error


def with_shapes(
    facts: RunFacts, models: Mapping[str, OnnxModel], shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> RunFacts:
    """The facts with constants and inferred shapes, for a dry run. `models` and `shapes` of inputs by file name."""
    sessions = tuple(
        replace(
            session,
            constants=models[session.file].constants,
            fixed_shapes=fixed_shapes(models[session.file].proto, shapes.get(session.file, {})),
        )
        for session in facts.sessions
    )
    return replace(facts, sessions=sessions)


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
    return DryRunFacts.copy_of(
        simulated,
        device=simulated.key,
        device_name=simulated.name,
        compute_capability=".".join(map(str, simulated.capability)),
        provider_library=library.name,
        onnxruntime_version=runtime_version(library),
        cuda_version=CUDA_VERSION_TEXT,
        stub_build=build,
        not_real=NOT_REAL,
    )


def _place_folder(options: PlaceOptions, where: OpenOptions, audience: Audience) -> Placed:
    """Place a package or a foreign folder; the shapes are those of a decode step."""
    path = Path(options.model)
    manifest = open_folder(path, Choice.of(options))
    with refusals_explained(options.probe_seconds, audience):
        placed = place_package(path, where, manifest)
    models = {session.file: read_onnx(path / session.file) for session in placed.facts.sessions}
    sizes = {file: decode_sizes(model) for file, model in models.items()}
    return placed, models, sizes, {"package": package_facts(path, manifest)}


def _place_file(options: PlaceOptions, where: OpenOptions, audience: Audience) -> Placed:
    """Place an ONNX file, or that of a model package for the first provider of the chain.

    In a model package, symbolic sizes are 1 unless sizes are given.
    """
    path, data_folder = Path(options.model), None
    notes: tuple[str, ...] = ()
    shapes = dict(options.shapes or {})
    if path.is_dir():
        variant = choose_variant(path, options.variant, [provider.ort_name for provider in where.chain])
        path, data_folder, notes = variant.path, variant.weights, (f"variant {variant.label} of the model package",)
    model = read_onnx(path, data_folder)
    model = replace(model, notes=(*notes, *model.notes))
    if notes and not shapes:
        shapes = {size: 1 for port in model.inputs for size in port.shape or () if isinstance(size, str)}
    sizes, values = read_inputs(model.inputs, shapes, options.inputs or {})
    with refusals_explained(options.probe_seconds, audience, model, sizes):
        placed = place_model(model, sizes, replace(where, values=values))
    facts = ModelFacts(
        file=path.name,
        sha256=sha256_of(path),
        data_files=model.data_files,
        ir_version=model.proto.ir_version,
        opsets=dict(model.opsets),
        nodes=len(model.nodes),
        inputs=tuple(ModelInput.copy_of(port, shape=sizes.get(port.name)) for port in model.inputs),
    )
    return placed, {path.name: model}, {path.name: sizes}, {"model": facts}


def _request_of(options: PlaceOptions, target: Target) -> Request:
    """The request, for the report."""
    shapes = [size_text(name, sizes) for name, sizes in (options.shapes or {}).items()]
    files = [f"{name}={os.fspath(path)}" for name, path in (options.inputs or {}).items()]
    return Request(
        verb="place",
        path=os.fspath(options.model),
        chain=target.ort_names,
        chain_source=target.source,
        options=option_texts(target, Choice.of(options), shape=shapes, input=files),
        threads=options.threads,
        runs=options.runs,
        prompt_tokens=None,
        max_new_tokens=None,
        prefill_chunk_tokens=None,
        limits=Limits.of(options).by_option(),
    )
