"""Plans a model on a device: memory, largest settings, and speed, without running it; rates of this machine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import ValidationError

import partita
from partita.capacity.records import DeviceFacts, Estimate, MachineRates, Plan
from partita.errors import CheckpointError, PackageError, PartitaError, ResourceError, UsageError, out_of_memory
from partita.export.options import ExportOptions
from partita.export.progress import Progress, Silent, stage
from partita.extras import checked_versions
from partita.files import cache_folder, temporary_directory
from partita.files import replace as replace_file
from partita.foreign.folder import open_folder
from partita.foreign_paths import CONFIG, recognise
from partita.library.api import QUIET, Audience, from_fields
from partita.library.engine.jobs import run_job
from partita.observations.text_format import human_bytes, plural
from partita.options.fields import MAX_TOKENS
from partita.options.inspection import PlanOptions
from partita.package.contract import Contract
from partita.package.folder import Manifest, is_package
from partita.process import free_bytes, rss_bytes
from partita.providers.base import Provider
from partita.providers.cuda import PROVIDER as CUDA
from partita.providers.cuda_dry_run.devices import Device, device
from partita.providers.resolve import parse_chain
from partita.runtime.cpu import VARIABLE, cpu_flags, cpu_name, usable_cores
from partita.runtime.machine import nvidia_gpus, runtime_wheels
from partita.runtime.place.model_file import read_light

if TYPE_CHECKING:
    import onnx

    from partita.capacity.memory import Requirements

HERE = "here"
BASES = {
    True: "rates of this machine, measured with ONNX Runtime's CPU provider; interval: 20 % either way",
    False: "bandwidth and arithmetic of the data sheet; assumed shares: 30 to 90 % of bandwidth, 20 to 70 % of "
    "arithmetic; not measured",
}

FORMAT = 2
"""Increment when the measurement changes."""
MEASURE, MOST_SECONDS = "partita.runtime.ort.rates:measure", 300.0


Planned = tuple[Contract, Sequence["onnx.ModelProto"], dict[str, Any]]
"""A model to plan: its contract, its graphs without weights, and fields of the plan."""


@from_fields(PlanOptions)
def plan(options: PlanOptions) -> Plan:
    """Whether a model fits a device at a context and batch size, the largest that fit, and its speed there.

    `model`: a checkpoint (without its weights, if only config.json is there), GGUF file, hub id, package or folder.
    `device`: "here" or the name of a GPU. Memory is computed from the graph that an export writes. Raises
    ArgumentError, CheckpointError, UnsupportedModelError, PackageError, and InstallationError without the extra
    `export`, except for packages.
    """
    return make_plan(options)


def make_plan(options: PlanOptions, progress: Progress | None = None, audience: Audience = QUIET) -> Plan:
    """The plan for checked options. Raises a PartitaError."""
    gpu = None if options.device == HERE else device(options.device, others=(HERE,))
    given, path = os.fspath(options.model), Path(options.model)
    context, prompt = options.context or MAX_TOKENS, options.prompt_tokens or 1
    if prompt >= context:
        raise UsageError(f"`prompt_tokens={prompt}` leaves no room for output in `context={context}`; use fewer")
    if path.is_dir() and (is_package(path) or not (path / CONFIG).is_file() or any(path.glob("**/*.onnx"))):
        planned = _package(path, options)
    else:
        if os.path.lexists(path) and path.name != CONFIG and not recognise(path).is_checkpoint:
            raise CheckpointError(
                f"{path}: neither a checkpoint nor a package: {recognise(path).description}; name a folder, a GGUF "
                f"file, or a config file called {CONFIG}"
            )
        planned = _checkpoint(given, options, gpu, progress or Silent())
    return _plan_of(planned, given, options, gpu, here_rates(audience) if gpu is None else None)


def _plan_of(planned: Planned, name: str, options: PlanOptions, gpu: Device | None, rates: MachineRates | None) -> Plan:
    """The plan of a model. `rates`: of this machine, without `gpu`."""
    from partita.capacity.speed import phase_plans

    contract, models, about = planned
    context, batch = options.context or contract.max_length, options.batch
    prompt = options.prompt_tokens or max(1, context // 2)
    model = requirements(contract, models, rates)
    facts = device_facts(gpu, rates)
    prefill, decode = phase_plans(model, gpu or rates, batch, prompt)  # type: ignore[arg-type]
    step, required = decode.seconds, model.total(context, batch)
    shapeless = sum(costs.unknown_shapes for _, costs in model.graphs)
    unknown = f"{plural(shapeless, 'activation')} without a shape in the file"
    notes = [*about.pop("notes", ()), *([f"workspace: {unknown} are not counted"] if shapeless else [])]
    return Plan(
        **about,
        partita_version=partita.__version__,
        model=name,
        device=facts,
        context=context,
        batch=batch,
        prompt_tokens=prompt,
        fits=required <= facts.available_bytes,
        required_bytes=required,
        load_bytes=model.loading(),
        memory=model.parts(context, batch),
        cache_bytes_per_token=model.cache(2, 1) - model.cache(1, 1),
        largest_context=model.largest_context(batch, facts.available_bytes, about["context_limit"]),
        largest_batch=model.largest_batch(context, facts.available_bytes, about["batch_limit"]),
        phases=(prefill, decode),
        first_token_seconds=prefill.seconds,
        decode_tokens_per_second=Estimate(value=batch / step.value, low=batch / step.high, high=batch / step.low),
        speed_basis=BASES[gpu is None],
        notes=tuple(notes),
    )


def requirements(contract: Contract, models: Sequence[onnx.ModelProto], rates: MachineRates | None) -> Requirements:
    """The memory of a model: on this machine's CPU with `rates`, else on a GPU."""
    from partita.capacity.costs import graph_costs
    from partita.capacity.memory import Requirements
    from partita.runtime.cpu import attention_path, choose, find_attention

    graphs, heads, naive = [], 0, 0
    for file, model in zip(contract.files, models, strict=True):
        graphs.append((file, graph_costs(model, contract, file)))
        attention = attention_path(find_attention(model), file.sequence_length)
        if attention is not None and rates is not None:
            chosen = choose(attention, rates.threads, avx512=uses_naive_attention())
            heads = max(attention.heads)
            naive = heads if chosen is not None and chosen.path == "naive" else naive
    return Requirements(
        contract,
        tuple(graphs),
        process_bytes=0 if rates is None else rates.process_bytes,
        on_cpu=rates is not None,
        naive_heads=naive,
        query_heads=heads,
    )


def device_facts(gpu: Device | None, rates: MachineRates | None) -> DeviceFacts:
    """The device of a plan."""
    if gpu is not None:
        source = f"data sheet: {gpu.gigabytes_per_second:,} GB/s, {gpu.teraflops[1]:g} TFLOP/s in float16"
        return DeviceFacts(
            name=gpu.key,
            title=gpu.name,
            memory_bytes=gpu.memory_bytes,
            available_bytes=gpu.memory_bytes,
            source=f"{source}; the CUDA context is not counted",
        )
    assert rates is not None
    memory = psutil.virtual_memory()
    return DeviceFacts(
        name=HERE,
        title=f"{cpu_name()}, {rates.threads} threads",
        memory_bytes=int(memory.total),
        available_bytes=int(free_bytes()),
        source=f"measured here: {rates.read_bytes_per_second / 1e9:.3g} GB/s",
    )


def _package(path: Path, options: PlanOptions) -> Planned:
    """A package or a folder of another exporter. Raises PackageError, UsageError."""
    manifest = open_folder(path)
    contract = manifest.graph
    if options.precision not in ("auto", contract.precision):
        raise UsageError(
            f"`precision={options.precision}`: {path} is a package in {contract.precision}; omit it, or plan its "
            "checkpoint"
        )
    limits = {"context": contract.max_length_limit or contract.max_length, "batch": contract.batch_size}
    for name, most in limits.items():
        requested = getattr(options, name) or 1
        if requested > most:
            raise UsageError(
                f"`{name}={requested}`: {path} is written for at most {most}; use less, or plan its checkpoint"
            )
    try:
        models = read_graphs(path, contract)
    except (OSError, ValueError) as error:
        raise PackageError(f"{path}: a graph cannot be read ({error})") from error
    about = {
        "kind": "package" if manifest.foreign is None else "folder",
        "model_type": manifest.source.model_type,
        "parameters": manifest.source.parameters if manifest.foreign is None else 0,
        "precision": contract.precision,
        "attention": contract.attention,
        "context_limit": limits["context"],
        "batch_limit": limits["batch"],
    }
    return contract, models, about


def _checkpoint(given: str, options: PlanOptions, gpu: Device | None, progress: Progress) -> Planned:
    """The graphs that an export writes for the device. Raises CheckpointError, UnsupportedModelError, UsageError."""
    with stage(progress, "load libraries", {}):
        import onnx

        from partita.export.options import most_positions
        from partita.export.pipeline import planned_graphs
        from partita.export.target import Kernels, Target, skeleton
        from partita.export.work import Work
        from partita.library.place.target import find_target, supported_by_cpu
    if gpu is None:
        target = find_target("cpu", {}, default_allowed=True, libraries={})
    else:
        kernels = Kernels(**asdict(CUDA.packed_weights), folds=CUDA.compiles)
        target = Target(CUDA.name, HERE, CUDA.preferred_attention, "not probed for a plan", kernels=kernels)
    with checked_versions(), temporary_directory() as scratch:
        out = Path(scratch) / "package"
        # of batch size 1: memory and time of more rows follow from its graph
        export = ExportOptions(given, out=out, precision=options.precision, max_length=options.context)
        work = Work(export, progress, out, supports=supported_by_cpu)
        try:
            checkpoint, found = planned_graphs(work, target)
        except PartitaError as error:
            text = error.problem.replace("`max_length=", "`context=").replace(scratch, given)
            raise type(error)(text, remedy=error.remedy) from error
        models = [onnx.load_from_string(skeleton(model)) for model in found.models]
        about = {
            "kind": "checkpoint" if checkpoint.files else "config",
            "model_type": checkpoint.model_type,
            "parameters": found.manifest.source.parameters,
            "precision": work.options.precision,
            "attention": found.manifest.graph.attention,
            "context_limit": most_positions(checkpoint),
            "batch_limit": None,
            "notes": tuple(work.notes),
        }
        return found.manifest.graph, models, about


def read_graphs(folder: Path, contract: Contract) -> list[onnx.ModelProto]:
    """The graphs of a package without weights. Raises OSError, ValueError."""
    return [read_light(folder / file.file) for file in contract.files]


def measured_requirements(
    folder: Path, manifest: Manifest, *, on_cpu: bool
) -> tuple[Requirements | None, MachineRates | None]:
    """The memory and work of a package, on this machine's CPU if `on_cpu`, and its rates; None for unknown."""
    rates = stored_rates()
    with suppress(OSError, ValueError):  # the run read the graphs; they may be gone
        model = requirements(manifest.graph, read_graphs(folder, manifest.graph), rates)
        return replace(model, on_cpu=on_cpu), rates
    return None, rates


def with_what_fits(error: ResourceError, folder: Path, manifest: Manifest, chain: Sequence[Provider]) -> ResourceError:
    """The error of a lack of memory, with the largest context and batch that fit, if known."""
    with suppress(OSError, ValueError, MemoryError, PartitaError):
        gpus = nvidia_gpus() if chain[0].name == CUDA.name else ()
        if chain[0].name != "cpu" and not gpus:
            return error
        contract = manifest.graph
        model = requirements(contract, read_graphs(folder, contract), None if gpus else stored_rates())
        model = replace(model, on_cpu=not gpus, process_bytes=model.process_bytes or (0 if gpus else rss_bytes()))
        available = gpus[0].memory_bytes if gpus else int(free_bytes()) + rss_bytes()
        found = [
            f"context {context:,} with batch {batch}"
            for batch in sorted({1, contract.batch_size})
            if (context := model.largest_context(batch, available, contract.max_length))
        ]
        text = f"largest that fit {human_bytes(available)}: {' or '.join(found) or 'nothing'} (see partita plan)"
        return ResourceError(f"{error.message}; {text}", path=error.path, remedy=error.remedy)
    return error


@contextmanager
def naming_what_fits(folder: Path, manifest: Manifest, chain: Sequence[Provider]) -> Iterator[None]:
    """Raise the errors of a lack of memory with the largest settings that fit."""
    try:
        yield
    except (ResourceError, MemoryError) as error:
        lack = error if isinstance(error, ResourceError) else out_of_memory()
        raise with_what_fits(lack, folder, manifest, chain) from error


def _rates_file() -> Path | None:
    """The file for this processor, number of threads and ONNX Runtime; None without a cache folder."""
    folder = cache_folder("rates")
    machine = [
        FORMAT,
        cpu_name(),
        usable_cores().threads(),
        [f"{each.name} {each.version}" for each in runtime_wheels()],
    ]
    name = hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:16]
    return None if folder is None else folder / f"{name}.json"


def uses_naive_attention() -> bool:
    """Whether the rates are those of the naive attention path; see `runtime.cpu.choose`."""
    return "avx512f" in cpu_flags()


def stored_rates() -> MachineRates | None:
    """The rates of this machine; None if they were not measured."""
    path = _rates_file()
    with suppress(OSError, ValidationError, UnicodeDecodeError):  # measured again
        return None if path is None else MachineRates.model_validate_json(path.read_text(encoding="utf-8"))
    return None


def here_rates(audience: Audience = QUIET, *, again: bool = False) -> MachineRates:
    """The rates of this machine, measured and kept if they are not known. Raises as `run_job`."""
    found = None if again else stored_rates()
    if found is not None:
        return found
    environment = {**os.environ, VARIABLE: str(int(uses_naive_attention()))}
    with audience.busy("measuring the rates of this machine"):
        threads, _ = usable_cores().threads()
        rates: MachineRates = run_job(
            MEASURE, threads, chain=parse_chain("cpu"), environment=environment, timeout=MOST_SECONDS
        )
    path = _rates_file()
    with suppress(OSError):  # a cache that cannot be written
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, rates.model_dump_json())
    return rates
