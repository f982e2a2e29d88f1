"""Opens any ONNX model or package, runs it a few times, and returns facts for a report.

A package is run by the generation engine on dummy token ids, another model on given or generated inputs in host memory.
The facts of an opened session are returned even when its run fails.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes, process
from partita.errors import GenerationError, PartitaError, ProviderError, ResourceError
from partita.observations.codes import Interruption
from partita.observations.facts import PortFact, RunFacts, StepFact
from partita.observations.names import RUN
from partita.observations.records import Memory
from partita.observations.text_format import listing
from partita.package.folder import Manifest
from partita.process import peak_rss_bytes, rss_bytes
from partita.providers.base import Provider
from partita.providers.resolve import Resolution, known_providers, resolve
from partita.remedies import Remedy
from partita.runtime.chain.open_chain import open_session
from partita.runtime.chain.pins import Pin
from partita.runtime.chain.provider_state import without_crashed
from partita.runtime.chain.run_errors import (
    RUN_ERRORS,
    RunInterruptedError,
    RunLateError,
    crashed_in_run,
    failed_run_error,
    release_frames,
    run_notes,
)
from partita.runtime.cpu.settings import will_repeat
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.record import session_facts
from partita.runtime.generate.request import Request
from partita.runtime.generate.run_facts import LIMIT_BYTES, run_facts, with_optimised
from partita.runtime.generate.runner import Runner, load_runner
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import HOST_MEMORY, Buffer, host_buffer
from partita.runtime.ort.errors import SHORTER
from partita.runtime.ort.evidence import parse_profile, unread_profile
from partita.runtime.ort.native_log import captured_output
from partita.runtime.ort.registry import available_ort_names, model_compatibility
from partita.runtime.ort.session import NativeFailureError, Session, open_native
from partita.runtime.place.inputs import SEED, Shape, check_free_memory, make_values, not_generated
from partita.runtime.place.onnx_model import ModelPort, OnnxModel, fixed_shapes
from partita.runtime.time_limit import LateError, in_time, is_still_running

PHASE = "run"
PREFILL_TOKENS = 16
"""Dummy prompt length in tokens if the graph supports any number of tokens."""
DUMMY_TOKEN = 0
SMALLER_INPUTS = Remedy("free memory, or set smaller input sizes")
NOT_FAILED = (RunInterruptedError, RunLateError)
"""Errors of runs that were interrupted."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """Options of opening and running a model."""

    chain: tuple[Provider, ...]
    options: Mapping[str, Mapping[str, str]]
    """Provider options by provider name."""
    pins: tuple[Pin, ...]
    threads: int | None
    runs: int
    """Session runs per phase."""
    run_seconds: float = math.inf
    """Time limit for all runs of an ONNX file, in seconds."""
    values: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Values of inputs of an ONNX file, by name; others are generated."""
    crashed: Mapping[str, str] = field(default_factory=dict)
    """Providers to skip because they crashed on this model, by name, and how they crashed."""
    dry_run: bool = False
    """A dry run: generated floats are lazily allocated zeros."""


@dataclass(frozen=True, slots=True)
class _Ran:
    """The result of running an ONNX file."""

    steps: tuple[StepFact, ...]
    """Number of successful runs."""
    error: PartitaError | None = None
    """Error of the next run; None if it exceeded the time limit after other runs."""
    timed_out: bool = False
    """Whether the next run exceeded the time limit."""
    still_running: bool = False
    """Whether it also ignored the request to stop, so that a thread still runs the session."""


@dataclass(frozen=True, slots=True)
class PlacementFacts:
    """Facts of a placement."""

    facts: RunFacts
    resolutions: tuple[Resolution, ...]
    """State of each provider of the chain."""
    error: PartitaError | None
    """Error of a run; the facts are of earlier runs."""


@contextmanager
def printed_kernels(chain: Sequence[Provider]) -> Iterator[None]:
    """Let providers print the kernels of each run to stdout, which `Session.listening` captures.

    In Partita's own processes and their main thread only, where lines of other runs are discarded.
    """
    names = dict.fromkeys(name for provider in chain for name in provider.debug_variables if name not in os.environ)
    if not names or not process.own_process or threading.current_thread() is not threading.main_thread():
        yield
        return
    with captured_output((process.STDOUT,)):
        os.environ.update(dict.fromkeys(names, "1"))
        try:
            yield
        finally:
            for name in names:
                os.environ.pop(name, None)


def place_model(model: OnnxModel, shapes: Mapping[str, Shape], opening: OpenOptions) -> PlacementFacts:
    """Open a model on the chain and run it on inputs of these shapes.

    Raises ProviderError when the chain cannot be honoured, PackageError when ONNX Runtime cannot load the model,
    ResourceError when memory runs out.
    """
    if not opening.dry_run:
        check_free_memory(model.inputs, shapes, opening.values)
    before = rss_bytes()
    resolutions = without_crashed(resolve(opening.chain, available_ort_names(), opening.options), opening.crashed)
    session = open_session(
        model.path,
        resolutions,
        threads=opening.threads,
        observe=True,
        pins=opening.pins,
        model=model.to_bytes(),
        weights=model.data_folder,
    )
    with closing(session):
        after = rss_bytes()
        will_repeat(session)
        lacking = [f"{port.name} is {kind}" for port in model.inputs if (kind := not_generated(port))]
        missing = "not run, so measurements are missing: no values can be generated for inputs: "
        not_run = (f"{missing}{listing(lacking)}",) if lacking else ()
        crashed = opening.crashed.get(RUN)
        opened_only = bool(not_run or crashed)
        ran, ports = _run_session(model, shapes, session, replace(opening, runs=0) if opened_only else opening)
        error, steps, late = ran.error, ran.steps, opening.run_seconds if ran.timed_out else None
        if crashed and error is None:
            error = crashed_in_run(model, crashed, opening.values)
        profile = session.end_profiling()
        events, windows = parse_profile(profile, [(PHASE, 0)] * len(steps)) if profile else ((), ())
        seen = session_facts(
            session,
            session.resolutions,
            graph=model.nodes,
            inner=model.subgraph_nodes,
            file=model.path.name,
            phases=(PHASE,),
            ports=ports,
            events=events,
            runs=windows,
        )
        facts = RunFacts(
            sessions=(seen,),
            states=(),
            steps=steps,
            memory=_memory(model, before, after),
            tokenizer_load_seconds=0.0,
            first_token_seconds=None,
            prompt_tokens=0,
            new_tokens=0,
            finish_reason=None,
            interruptions=("runs",) if isinstance(error, RunInterruptedError) else (),
            notes=(
                *model.notes,
                *model_compatibility({entry.key: entry.value for entry in model.proto.metadata_props}),
                *session.notes,
                *not_run,
                *run_notes(len(steps), opening.runs, error, late, still_running=ran.still_running),
                *(unread_profile(len(steps), seen.runs) if not ran.still_running else ()),
            ),
        )
        if not ran.still_running:  # a second session could wait for a run that does not end
            facts = with_graphs(facts, (session,), error)
        return PlacementFacts(facts, session.resolutions, error)


def _memory(model: OnnxModel, before: int, after: int) -> Memory:
    """Memory of the process, with its resident bytes before and after the session was opened."""
    return Memory(
        weight_bytes=model.weight_bytes,
        cache_bytes=0,
        rss_before_load_bytes=before,
        rss_after_load_bytes=after,
        peak_rss_bytes=max(peak_rss_bytes(), before, after),
    )


def _run_session(
    model: OnnxModel, shapes: Mapping[str, Shape], session: Session, opening: OpenOptions
) -> tuple[_Ran, tuple[PortFact, ...]]:
    """The result of the runs, and facts of inputs and outputs.

    The binding is released before the session, because device values that outlive their session crash WebGPU.
    """
    binding = session.binding()
    ran = _run_model(model, shapes, binding, opening, partial(session.listening, PHASE))
    if ran.still_running:
        session.profiling = False  # `close` will not wait for the run or read its profile
    ports = _port_facts(model, session, binding, ran=bool(ran.steps) and not ran.still_running)
    release_frames(ran.error)
    if isinstance(ran.error, GenerationError | ProviderError) and not isinstance(ran.error, NOT_FAILED):
        failure = failed_run_error(
            model, session, ran.error, opening.values, lambda: _runs_on_cpu(model, session, binding)
        )
        ran = replace(ran, error=failure)
    if isinstance(ran.error, ResourceError) and ran.error.remedy == SHORTER:  # an ONNX file has no cache to shorten
        ran = replace(ran, error=ResourceError(ran.error.message, remedy=SMALLER_INPUTS))
    return ran, ports


def _runs_on_cpu(model: OnnxModel, session: Session, binding: Binding) -> bool | None:
    """Whether the CPU provider runs the model on the bound inputs; None if unknown, also for large weights."""
    if model.weight_bytes > LIMIT_BYTES:
        return None
    cpu = Resolution(known_providers()["cpu"], "active")
    try:
        other = open_native(model.path, [cpu], replace(session.opening, observe=False, strict=False, config={}))
    except NativeFailureError:
        return None
    try:
        outputs, _ = other.run_once({port.name: binding.buffers[port.name].host for port in model.inputs})
    except (TypeError, ValueError):  # an input that has no numpy array, or of a type that numpy lacks
        return None
    finally:
        other.close()
    return outputs is not None


def _run_model(
    model: OnnxModel,
    shapes: Mapping[str, Shape],
    binding: Binding,
    opening: OpenOptions,
    listening: Callable[[], AbstractContextManager[None]],
) -> _Ran:
    """Run on given or generated inputs within the time limit.

    Inputs are bound before every run, as with new data, so that each run includes the copy to a device.
    """
    rng = np.random.default_rng(SEED)
    steps: list[StepFact] = []
    buffers: dict[str, Buffer] = {}

    def step() -> None:
        began = time.perf_counter()
        for name, buffer in buffers.items():
            binding.bind_input(name, buffer)
        bound = time.perf_counter()
        binding.run()
        steps.append(StepFact(PHASE, 0, time.perf_counter() - bound, bound - began, observed=True))

    try:
        for port in model.inputs if opening.runs else ():
            buffers[port.name] = filled_buffer(port, shapes[port.name], opening, rng)
        for name in model.outputs:
            binding.bind_fresh_output(name)
        until = time.monotonic() + opening.run_seconds
        for _ in range(opening.runs):
            with listening():
                in_time(step, binding.stop, until - time.monotonic())
    except KeyboardInterrupt:
        return _Ran(tuple(steps), RunInterruptedError(model.path), still_running=is_still_running(step))
    except LateError as late:
        error = None if steps else RunLateError(model, opening.run_seconds, opening.values)
        return _Ran(tuple(steps), error, timed_out=True, still_running=late.still_running)
    except RUN_ERRORS as error:
        return _Ran(tuple(steps), error)
    return _Ran(tuple(steps))


def filled_buffer(port: ModelPort, shape: Shape, opening: OpenOptions, rng: np.random.Generator) -> Buffer:
    """The buffer of an input in host memory, with its values."""
    values, buffer = opening.values.get(port.name), host_buffer(shape, port.dtype)
    if values is None and opening.dry_run and dtypes.is_float(port.dtype):
        return buffer
    buffer.host[...] = make_values(port, shape, rng) if values is None else values
    return buffer


def _port_facts(model: OnnxModel, session: Session, binding: Binding, *, ran: bool) -> tuple[PortFact, ...]:
    """Required memory of inputs and outputs; all are bound in host memory."""
    memory = session.required_memory
    sizes: dict[str, int | None] = {name: buffer.size_bytes for name, buffer in binding.buffers.items()}
    if ran:
        shapes = binding.output_shapes()
        for port in session.outputs:
            element, shape = port.type.removeprefix("tensor(").removesuffix(")"), shapes[port.name]
            if shape is None or dtypes.bits_of(element) is None:  # a sequence, or strings
                sizes[port.name] = None
            else:
                sizes[port.name] = dtypes.size_bytes(element, shape)
    named = [("input", port.name) for port in model.inputs] + [("output", name) for name in model.outputs]
    return tuple(
        PortFact(name, direction, direction, memory[name], HOST_MEMORY, sizes.get(name))
        for direction, name in named
        if name in memory
    )


def place_package(folder: Path, opening: OpenOptions, manifest: Manifest | None = None) -> PlacementFacts:
    """Open a package on the chain and run its prefill and decode graphs on dummy tokens.

    `manifest`: of a folder without a manifest file. Raises PackageError, ProviderError, ResourceError.
    """
    with load_runner(
        folder,
        opening.chain,
        threads=opening.threads,
        observe=True,
        manifest=manifest,
        options=opening.options,
        pins=opening.pins,
        crashed=opening.crashed,
        wants_tokens=False,
    ) as runner:
        error = run_package(runner, opening.runs)
        release_frames(error)
        facts = run_facts(runner, notes=run_notes(len(runner.steps), 2 * opening.runs, error))
        facts = with_graphs(facts, [entry.session for entry in runner.graphs], error)
        interruptions: tuple[Interruption, ...] = ("runs",) if isinstance(error, RunInterruptedError) else ()
        # The dummy tokens are not a result.
        facts = replace(facts, finish_reason=None, new_tokens=0, first_token_seconds=None, interruptions=interruptions)
        return PlacementFacts(facts, runner.resolutions, error)


def with_graphs(facts: RunFacts, sessions: Sequence[Session], error: PartitaError | None) -> RunFacts:
    """The facts with optimised graphs, unless memory ran out or the run was interrupted."""
    return facts if isinstance(error, ResourceError | RunInterruptedError) else with_optimised(facts, sessions)


def run_package(runner: Runner, runs: int) -> PartitaError | None:
    """Run `runs` prompts of one step each, then `runs` decode steps, with the generation engine; return its error."""
    engine = GenerationLoop(runner, PREFILL_TOKENS)
    graphs = runner.capacity
    try:
        for _ in range(runs):
            _begin(engine, graphs.chunk or min(PREFILL_TOKENS, graphs.max_length))
            engine.step()
        for _ in range(runs if graphs.max_length > 1 else 0):
            decode(engine)
    except KeyboardInterrupt:
        return RunInterruptedError(runner.folder)
    except RUN_ERRORS as error:
        return error
    return None


def _begin(engine: GenerationLoop, tokens: int) -> None:
    """Begin a new dummy prompt of this many tokens in every row."""
    for row, request in enumerate(engine.rows):
        if request is not None:
            engine.release_row(row)
    engine.records = False  # record steps only
    budget = engine.runner.capacity.max_length  # never reached: the cache is full before
    for _ in engine.rows:
        # The next token does not depend on the logits, which a dry run does not compute.
        dummy = Request([DUMMY_TOKEN] * tokens, lambda logits, history: DUMMY_TOKEN, budget, any_logits=True)
        engine.add_request(dummy)
    engine.records = True


def decode(engine: GenerationLoop) -> None:
    """Run one decode step. With a full cache, remove the last token of every row, or begin a new prompt.

    A cache of two tokens, which is full again at once, gets no decode step.
    """
    anew = False
    while (step := engine.step()) is None or step.phase != "decode":
        if step is not None or _remove_last(engine):
            continue
        if anew:
            return
        _begin(engine, 1)
        anew = True


def _remove_last(engine: GenerationLoop) -> bool:
    """Remove the last token of every row, so that it is generated again; False if the cache cannot be rewound."""
    cache = engine.runner.cache
    if not engine.runner.can_remove_last or any(filled < 2 for filled in cache.lengths):
        return False
    for index, row in enumerate(engine.rows):
        if row is not None:
            cache.rewind(index, 1)
            row.known, row.finish, row.read_until = row.known - 1, None, min(row.read_until, row.known - 2)
    return True


def with_shapes(
    facts: RunFacts, models: Mapping[str, OnnxModel], shapes: Mapping[str, Mapping[str, Shape]]
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
