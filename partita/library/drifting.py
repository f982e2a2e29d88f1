"""Compares the tensors of a model on one provider with those on another, in a worker process if either may crash."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from partita.drift.records import Drift, headline
from partita.dtypes import precision
from partita.errors import InstallationError, PackageError, PartitaError, UsageError
from partita.extras import explain
from partita.files import temporary_directory
from partita.foreign.folder import Choice, open_folder
from partita.foreign_paths import CONFIG
from partita.library.api import QUIET, Audience, from_fields
from partita.library.chain import Target, read_chain
from partita.library.engine.jobs import run_job
from partita.library.loading import in_child
from partita.options.groups import ProviderChain
from partita.options.placement import DriftOptions
from partita.package.folder import Manifest
from partita.providers.resolve import parse_chain

if TYPE_CHECKING:
    from partita.drift.sides import Side, Step
    from partita.export.checkpoint.description import Checkpoint

CPU_CHAIN = "cpu"
LOCATE_SECONDS = 60
"""Time limit of a comparison that a failed export makes."""
ORIGINAL = "original"
"""The value of `against` for the source model."""


@from_fields(DriftOptions)
def drift(options: DriftOptions) -> Drift:
    """Where the outputs of a package, folder or ONNX file on `providers` differ from those on `against`.

    `against`: a provider chain, by default "cpu"; the folder of a virtual environment with another ONNX Runtime, in
    which the same providers run; "original" for the source model of a package, or the folder of its checkpoint. The
    result has the error of every layer, the first node over tolerance, and whether a pin to the reference's provider
    helps. Raises ArgumentError, PackageError, CheckpointError, ResourceError, InstallationError, GenerationError, and
    ProviderError when a chain cannot be honoured.
    """
    return measure_drift(options, read_sides(options))


Sides = tuple[Target, Target, Path | str | None]
"""The chains of both sides, and another reference: an interpreter, or the checkpoint of the source model."""


def read_sides(options: DriftOptions) -> Sides:
    """The sides of a comparison.

    Raises UsageError; PackageError for a source model whose checkpoint is not known.
    """
    path, target = Path(options.model), read_chain(options)
    if path.is_dir():
        for name in ("shapes", "inputs"):
            if getattr(options, name):
                raise UsageError(f"`{name}` is for ONNX files; a package runs the text of its known answer")
    else:
        Choice.of(options).refuse_for_file()
    against = options.against
    if against == ORIGINAL or (against is not None and (Path(against) / CONFIG).is_file()):
        return target, target, source_checkpoint(options, path)
    if against is not None and (os.sep in against or Path(against).is_dir()):
        return target, target, interpreter(Path(against))
    parse_chain(against or CPU_CHAIN, argument="against")
    reference = read_chain(ProviderChain(against or CPU_CHAIN, threads=options.threads))
    if reference.chain == target.chain and not (target.options or target.pins):
        raise UsageError(
            f"`against={target.name}`: both sides are {target.name}; name another provider for one of them, "
            f"or `against={ORIGINAL}` for the source model"
        )
    return target, reference, None


def source_checkpoint(options: DriftOptions, path: Path) -> str:
    """The folder or hub id of the source model. Raises UsageError for a file, PackageError if it is not known."""
    against = str(options.against)
    if not path.is_dir():
        raise UsageError(f"`against={against}` is for packages and folders; {path} is a file, which runs no text")
    if against != ORIGINAL:
        return against
    recorded = open_folder(path, Choice.of(options)).source.checkpoint
    if not recorded or (not Path(recorded).is_dir() and recorded.count("/") != 1):
        raise PackageError(
            f"{path}: its source model is recorded as {recorded!r}, which is no folder here; "
            f"name the folder of the checkpoint, e.g. `against=./{Path(recorded or 'checkpoint').name}`"
        )
    return recorded


def interpreter(folder: Path) -> Path:
    """The interpreter of a virtual environment, or the interpreter itself. Raises UsageError if there is none."""
    found = [folder, folder / "bin" / "python", folder / "Scripts" / "python.exe"]
    python = next((path for path in found if path.is_file() and os.access(path, os.X_OK)), None)
    if python is None:
        raise UsageError(f"`against={folder}`: neither a provider chain, a virtual environment, nor a checkpoint")
    return python.absolute()


def measure_drift(options: DriftOptions, sides: Sides, *, audience: Audience = QUIET) -> Drift:
    """The comparison for checked options."""
    target, reference, _ = sides
    found: Drift = run_job(
        "partita.library.drifting:compare",
        *(options, sides),
        chain=(*target.chain, *reference.chain),
        in_worker=in_child(target, options.process) or in_child(reference, options.process),
        audience=audience,
    )
    return found


def compare(options: DriftOptions, sides: Sides, *, audience: Audience = QUIET) -> Drift:
    """The comparison in this process.

    Raises PackageError, ProviderError, ResourceError, UsageError, GenerationError, and CheckpointError.
    """
    from partita.drift.comparison import Settings
    from partita.drift.measure import measure
    from partita.drift.sides import Side, package_steps

    path, (target, reference, other) = Path(options.model), sides
    folder = path if path.is_dir() else path.parent
    tested = Side(folder, target.chain, target.options, target.pins, options.threads)
    side = Side(folder, reference.chain, reference.options, (), options.threads)
    settings = Settings(options.by == "node", options.free_running, options.tolerance)
    with ExitStack() as opened:
        if path.is_dir():
            manifest = open_folder(path, Choice.of(options))
            with audience.busy("running the reference"):
                steps = package_steps(side if other is None else cpu_side(folder), manifest)
        else:
            steps = [_file_step(options, path)]
        if isinstance(other, Path):
            side = opened.enter_context(_in_environment(replace(side, chain=tested.chain), other))
        elif other is not None:
            side = opened.enter_context(source_side(folder, manifest, other, steps))
        with audience.busy("comparing layers"):
            return measure(str(path), tested, side, steps, settings)


def cpu_side(folder: Path) -> Side:
    """A package on the CPU provider."""
    from partita.drift.sides import Side

    return Side(folder, read_chain(ProviderChain(CPU_CHAIN)).chain)


def _file_step(options: DriftOptions, path: Path) -> Step:
    """The run of an ONNX file. Raises UsageError, PackageError, ResourceError."""
    from partita.drift.sides import file_step
    from partita.runtime.place.inputs import check_free_memory, not_generated, read_inputs
    from partita.runtime.place.onnx_model import read_onnx

    model = read_onnx(path)
    shapes, values = read_inputs(model.inputs, options.shapes or {}, options.inputs or {})
    kinds = [f"{port.name} is {kind}" for port in model.inputs if (kind := not_generated(port))]
    if kinds:
        raise UsageError(f"{path}: cannot be run: no values can be generated for inputs: {', '.join(kinds)}")
    check_free_memory(model.inputs, shapes, values)
    return file_step(model, shapes, values)


@contextmanager
def _in_environment(side: Side, python: Path) -> Iterator[Side]:
    """The side in a worker process of another environment. Raises InstallationError if that ends."""
    from partita.runtime.worker.parent import Worker, WorkerLostError

    try:
        with Worker("partita.drift.sides", python=python) as worker:
            yield replace(side, place=str(python.parent.parent), call=partial(worker.call, "run_graph"))
    except WorkerLostError as error:
        raise InstallationError(
            f"{python}: the process {error.summary}; it needs Python 3.11 or newer and Partita's dependencies"
        ) from error


@contextmanager
def source_side(
    folder: Path, manifest: Manifest, checkpoint: Checkpoint | str, steps: Sequence[Step]
) -> Iterator[Side]:
    """The source model on the text of the steps. Raises InstallationError without torch, and the errors of loading."""
    from partita.drift.sides import SourceModel

    try:
        from partita.export.checkpoint.description import open_checkpoint
        from partita.export.verify.self_check import VERSIONS, SourceOutputs
    except ImportError as error:
        raise explain(error) or error from error
    tokens = [int(token) for step in steps for token in step.tokens]
    bits = precision(manifest.graph.precision).bits or 8  # of a foreign graph, if it is not known
    with temporary_directory() as scratch:
        opened = open_checkpoint(checkpoint) if isinstance(checkpoint, str) else checkpoint
        model = SourceOutputs(opened, tokens, Path(scratch))
        yield SourceModel(folder, (), weight_bits=bits, run_model=model, label=f"the source model ({VERSIONS})")


def locate(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> str:
    """Where a package on the CPU provider first differs from its source model, within a time limit."""
    from partita.drift.comparison import Settings
    from partita.drift.measure import measure
    from partita.drift.sides import package_steps
    from partita.runtime.time_limit import LateError

    tested, settings = cpu_side(folder), Settings(deadline=time.monotonic() + LOCATE_SECONDS)
    try:
        steps = package_steps(tested, manifest)
        with source_side(folder, manifest, checkpoint, steps) as side:
            found = measure(folder.name, tested, side, steps, settings)
    except LateError:
        return f"its first difference was not found within {LOCATE_SECONDS} s"
    except PartitaError as error:
        return f"its first difference was not found: {error.message}"
    if manifest.packed is not None and (found.layer is None or not found.layer.exceeds_tolerance):
        limit = f"tolerance {found.outputs.tolerance:.0e}"
        return f"its first difference was not found: no layer alone is over {limit}, which rounded weights need"
    return headline(found)
