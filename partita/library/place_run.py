"""Places one model in this process and makes the report: what `partita place` and its dry-run child have in common."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

from partita.check.limits import Limits
from partita.check.measures import repeated_phase
from partita.errors import PartitaError
from partita.foreign.folder import Choice, open_folder
from partita.library.audience import QUIET, Audience
from partita.library.chain import Target
from partita.library.crashes import NONE_CRASHED, Crashed
from partita.library.probing import decode_sizes, why_refused, with_probes
from partita.library.run_report import Asked, join, said_of
from partita.observations.names import EXPERIMENTS
from partita.observations.records import PackageFacts
from partita.observations.text_format import listing, plural
from partita.options import PlaceOptions
from partita.package import sha256_of
from partita.partition_reports.graph_capture import blocking_nodes
from partita.partition_reports.records import Report
from partita.partition_reports.request_records import DryRunFacts, GraphCapture, ModelFacts, ModelInput
from partita.runtime.advice import package_facts
from partita.runtime.capture import Attempt, try_capture
from partita.runtime.chain import ChainError, chain_entry
from partita.runtime.environment import environment
from partita.runtime.inputs import Shape, input_shapes, read_values, size_text
from partita.runtime.onnx_model import OnnxModel, read_onnx
from partita.runtime.ort.errors import NoKernelError, NotOpenedError
from partita.runtime.pins import parse_pins
from partita.runtime.place import Placed, Where, package_models, place_model, place_package, with_shapes
from partita.runtime.run_errors import RunInterruptedError

RUN_SECONDS = 120.0
"""Default limit of the runs of an ONNX file."""
NO_EXPERIMENTS = "no experiments were made: with them, too, the process was ended by native code"
CAPTURE_OPTION = "enable_cuda_graph"
FAILED_DRY = (
    "a failed run says nothing about the model in a dry run: values computed on the device read as zeros; sizes "
    "known only from a run are missing, and everything decided before the run holds"
)


def place(
    options: PlaceOptions,
    target: Target,
    played: DryRunFacts | None = None,
    *,
    whole: bool = True,
    audience: Audience = QUIET,
    crashed: Crashed = NONE_CRASHED,
) -> tuple[Report, PartitaError | None]:
    """Open, run, report. The second value is why a run failed, which takes nothing from the report.

    `played`: the device of a dry run. `whole`: False where only the limits are looked at. `crashed`: providers that are
    left out.
    Raises PackageError, UsageError, ProviderError, ResourceError.
    """
    pins = parse_pins(target.pins, target.chain)
    where = Where(
        target.chain,
        target.options,
        pins,
        options.threads,
        options.runs,
        RUN_SECONDS if options.run_seconds is None else options.run_seconds,
        whole,
        dry=played is not None,
        crashed=crashed,
    )
    package: PackageFacts | None = None
    model: ModelFacts | None = None
    models: dict[str, OnnxModel] = {}
    shapes: dict[str, dict[str, Shape]] = {}
    path = Path(options.model)
    if path.is_dir():
        manifest = open_folder(path, Choice.of(options))
        try:
            placed = place_package(path, where, manifest)
        except (ChainError, NoKernelError) as error:
            refused = read_onnx(error.path)
            raise why_refused(error, refused, decode_sizes(refused), options.probe_seconds, audience) from error
        package = package_facts(path, manifest)
        models = package_models(path, placed.facts)
        inputs = {file: decode_sizes(entry) for file, entry in models.items()}
    else:
        opened, files = read_onnx(path), options.inputs or {}
        values = read_values(opened.inputs, files)
        given = {name: array.shape for name, array in values.items()}
        sizes = input_shapes(opened.inputs, options.shapes or {}, given, files=files)
        try:
            placed = place_model(opened, sizes, replace(where, values=values))
        except (ChainError, NoKernelError, NotOpenedError) as error:
            raise why_refused(error, opened, sizes, options.probe_seconds, audience) from error
        model = _model_facts(opened, sizes)
        models, shapes = {path.name: opened}, {path.name: sizes}
        inputs = shapes
    seconds = 0.0 if isinstance(placed.error, RunInterruptedError) or EXPERIMENTS in crashed else options.probe_seconds
    facts, resolutions = with_probes(placed.facts, placed.resolutions, models, inputs, seconds, audience)
    if EXPERIMENTS in crashed:
        facts = replace(facts, notes=(*facts.notes, NO_EXPERIMENTS))
    if placed.error is not None and played is None and not isinstance(placed.error, RunInterruptedError):
        facts = replace(facts, failed=str(placed.error).removeprefix(f"{options.model}: "))
    if played is not None:
        facts = with_shapes(facts, models, shapes)
        if placed.error is not None and not isinstance(placed.error, RunInterruptedError):
            facts = replace(facts, notes=(*facts.notes, FAILED_DRY))
    entries = tuple(map(chain_entry, resolutions))
    report = join(facts, entries, environment(), _asked(options, target), package=package, model=model, played=played)
    if played is not None and options.graph_capture:
        report = _with_capture(report, options, placed, models)
    return report, placed.error


def _asked(options: PlaceOptions, target: Target) -> Asked:
    """What the report repeats of the request."""
    shapes = [size_text(name, sizes) for name, sizes in (options.shapes or {}).items()]
    files = [f"{name}={os.fspath(path)}" for name, path in (options.inputs or {}).items()]
    return Asked(
        verb="place",
        path=Path(options.model),
        chain=tuple(provider.ort_name for provider in target.chain),
        chain_source=target.source,
        options=said_of(target, Choice.of(options), shape=shapes, input=files),
        threads=options.threads,
        runs=options.runs,
        limits=Limits.of(options),
        skipped=target.skipped,
    )


def _model_facts(model: OnnxModel, shapes: dict[str, Shape]) -> ModelFacts:
    """What a report says of an ONNX file."""
    return ModelFacts(
        file=model.path.name,
        sha256=sha256_of(model.path),
        data_files=model.data_files,
        ir_version=model.proto.ir_version,
        opsets=dict(model.opsets),
        nodes=len(model.nodes),
        inputs=tuple(ModelInput.taken_from(port, shape=shapes.get(port.name)) for port in model.inputs),
    )


def _with_capture(report: Report, options: PlaceOptions, placed: Placed, models: dict[str, OnnxModel]) -> Report:
    """The report with the verdict on graph capture, one per ONNX file."""
    assert report.dry_run is not None
    verdicts = tuple(
        _judge(report, try_capture(model, placed.resolutions, CAPTURE_OPTION, options.threads))
        for model in models.values()
    )
    return report.model_copy(update={"dry_run": report.dry_run.model_copy(update={"graph_capture": verdicts})})


def _judge(report: Report, attempt: Attempt) -> GraphCapture:
    """Whether a session would be captured: ONNX Runtime has to open it, and nothing may be copied in its runs.

    ONNX Runtime looks for control flow and for nodes outside the device, not for the copies that it inserts later, nor
    for nodes between graph inputs and outputs, nor for kernels that wait for the host; the run that captures them
    fails. Nodes that it takes for shape computations it allows with a warning.
    """
    phase = repeated_phase([phase for phase in report.phases if phase.file == attempt.file])
    blocking = blocking_nodes(phase, report.chain[0].provider)
    evidence, accepted = attempt.said, attempt.opened
    fatal = [node for node in blocking if node.cause != "elsewhere" or not attempt.warned]
    if accepted and fatal:
        accepted = False
        reasons = listing(f"{plural(count, 'node')} ({why})" for why, count in Counter(n.why for n in fatal).items())
        evidence = f"ONNX Runtime opens the session, but the capturing run would fail: {reasons}"
    return GraphCapture(file=attempt.file, accepted=accepted, evidence=evidence, blocking=blocking)
