"""Compares the tensors of a model on one provider with those on another, in a worker process if either may crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from partita.drift.records import Drift
from partita.errors import UsageError
from partita.foreign.folder import Choice, open_folder
from partita.library.api import from_fields
from partita.library.audience import QUIET, Audience
from partita.library.chain import ChainOptions, Target, chain_of, read_chain_options
from partita.library.engine.jobs import run_job
from partita.library.loading import in_child
from partita.options.drift import DriftOptions

CPU_CHAIN = "cpu"


@from_fields(DriftOptions)
def drift(options: DriftOptions) -> Drift:
    """Where the outputs of a package, folder or ONNX file on `providers` differ from those on `against`.

    `against`: a provider chain, by default "cpu", or the folder of a virtual environment with another ONNX Runtime, in
    which the same providers run. The result has the error of every layer, the first node over tolerance, and whether a
    pin to the reference's provider helps. Raises ArgumentError, PackageError, ResourceError, InstallationError,
    GenerationError, and ProviderError when a chain cannot be honoured.
    """
    return measure_drift(options, *read_sides(options))


def read_sides(options: DriftOptions) -> tuple[Target, Target, Path | None]:
    """The chains of both sides, and the interpreter of the reference if it is another. Raises UsageError."""
    path, target = Path(options.model), read_chain_options(chain_of(options))
    if path.is_dir():
        for name in ("shapes", "inputs"):
            if getattr(options, name):
                raise UsageError(f"`{name}` is for ONNX files; a package runs the text of its known answer")
    elif Choice.of(options).setting_names:
        raise UsageError(f"`{Choice.of(options).setting_names[0]}` is only for foreign folders; omit it for a file")
    against = options.against
    if against is not None and (os.sep in against or Path(against).is_dir()):
        return target, target, interpreter(Path(against))
    if against == "original":
        raise UsageError("`against=original` is not supported; `partita verify` compares with the source model")
    given = ChainOptions(against or CPU_CHAIN, provider_libraries={}, threads=options.threads)
    reference = read_chain_options(given)
    if reference.chain == target.chain and not (target.options or target.pins):
        names = ",".join(provider.name for provider in target.chain)
        raise UsageError(f"`against={names}`: both sides are {names}; name another provider for one of them")
    return target, reference, None


def interpreter(folder: Path) -> Path:
    """The interpreter of a virtual environment, or the interpreter itself. Raises UsageError if there is none."""
    found = [folder, folder / "bin" / "python", folder / "Scripts" / "python.exe"]
    python = next((path for path in found if path.is_file() and os.access(path, os.X_OK)), None)
    if python is None:
        raise UsageError(f"`against={folder}`: neither a provider chain nor a virtual environment")
    return python.absolute()


def measure_drift(
    options: DriftOptions, target: Target, reference: Target, python: Path | None, *, audience: Audience = QUIET
) -> Drift:
    """The comparison for checked options."""
    found: Drift = run_job(
        "partita.library.drifting:compare",
        *(options, target, reference, python),
        chain=(*target.chain, *reference.chain),
        in_worker=in_child(target, options.process) or in_child(reference, options.process),
        audience=audience,
    )
    return found


def compare(
    options: DriftOptions, target: Target, reference: Target, python: Path | None, *, audience: Audience = QUIET
) -> Drift:
    """The comparison in this process.

    Raises PackageError, ProviderError, ResourceError, UsageError, GenerationError.
    """
    from partita.drift.inputs import chosen_steps, file_step, package_steps
    from partita.drift.measure import Settings, measure
    from partita.drift.sides import Side
    from partita.runtime.place.inputs import check_free_memory, input_shapes, not_generated, read_values
    from partita.runtime.place.onnx_model import read_onnx

    path = Path(options.model)
    folder = path if path.is_dir() else path.parent
    tested = Side(folder, target.chain, target.options, target.pins, options.threads)
    other = Side(folder, reference.chain, reference.options, (), options.threads, python)
    if path.is_dir():
        manifest = open_folder(path, Choice.of(options))
        with audience.busy("running the reference"):
            local = Side(folder, read_chain_options(ChainOptions(CPU_CHAIN)).chain) if python is not None else other
            steps = package_steps(local, manifest)
    else:
        model, files = read_onnx(path), options.inputs or {}
        values = read_values(model.inputs, files)
        given = {name: array.shape for name, array in values.items()}
        shapes = input_shapes(model.inputs, options.shapes or {}, given, files=files)
        kinds = [f"{port.name} is {kind}" for port in model.inputs if (kind := not_generated(port))]
        if kinds:
            raise UsageError(f"{path}: cannot be run: no values can be generated for inputs: {', '.join(kinds)}")
        check_free_memory(model.inputs, shapes, values)
        steps = [file_step(model, shapes, values)]
    settings = Settings(options.by == "node", options.free_running, options.tolerance)
    with audience.busy("comparing layers"), _runner_of(python) as run_reference:
        return measure(str(path), tested, other, steps, chosen_steps(steps), settings, run_reference)


@contextmanager
def _runner_of(python: Path | None) -> Iterator[Any]:
    """The function that runs a graph on the reference: here, or in a worker of another environment."""
    from partita.drift.sides import run_graph

    if python is None:
        yield run_graph
        return
    from partita.runtime.worker.parent import Worker

    with Worker("partita.drift.sides", python=python) as worker:
        yield partial(worker.call, "run_graph")
