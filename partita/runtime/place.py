"""Opens any ONNX model or package, runs it a few times on generated inputs, and keeps what is seen: facts for a report.

A package runs through the engine that generates, on dummy token ids. Another model has no cursor, cache or logits that
an engine could go by; it runs on generated inputs that lie in host memory, as a caller's numpy arrays would. A run that
fails does not lose what the opening of the session has told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.errors import GenerationError, PartitaError, ProviderError, ResourceError
from partita.observations.facts import PortFact, RunFacts, SessionFacts, StepFact
from partita.observations.names import RUN
from partita.observations.records import Memory
from partita.observations.text_format import listing
from partita.package import Manifest
from partita.process import peak_rss_bytes, rss_bytes
from partita.providers.base import Provider
from partita.providers.resolve import Resolution, resolve
from partita.remedies import Remedy
from partita.runtime.chain import open_session
from partita.runtime.cpu.settings import will_repeat
from partita.runtime.engine.loop import Engine
from partita.runtime.engine.request import Request
from partita.runtime.in_time import LateError, in_time, left
from partita.runtime.inputs import SEED, STRING, Shape, check_room, make_values, not_generated
from partita.runtime.onnx_model import ModelPort, OnnxModel, fixed_shapes, read_onnx
from partita.runtime.optimised import with_optimised
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import HOST_MEMORY, Buffer, host_buffer, text_buffer
from partita.runtime.ort.errors import SHORTER
from partita.runtime.ort.evidence import parse_profile, unread_profile
from partita.runtime.ort.registry import available_ort_names
from partita.runtime.ort.session import Session
from partita.runtime.pins import Pin
from partita.runtime.registering import without_crashed
from partita.runtime.run_errors import (
    RUN_ERRORS,
    RunInterruptedError,
    RunLateError,
    crashed_in_run,
    cut_short,
    failure_notes,
    late_notes,
    let_go,
    told_error,
)
from partita.runtime.run_facts import run_facts
from partita.runtime.runner import Runner, load_runner
from partita.runtime.session_facts import session_facts

PHASE = "run"
PREFILL_TOKENS = 16
"""Dummy prompt of a package, where its graph takes any number of tokens."""
DUMMY_TOKEN = 0
SMALLER_INPUTS = Remedy("free memory, or give its inputs smaller sizes")
NOT_FAILED = (RunInterruptedError, RunLateError)
"""What ended a run from outside."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where a model is to run, and how often."""

    chain: tuple[Provider, ...]
    options: Mapping[str, Mapping[str, str]]
    """Provider options by provider name."""
    pins: tuple[Pin, ...]
    threads: int | None
    runs: int
    """Session runs per phase."""
    run_seconds: float = math.inf
    """Longest time for the runs of an ONNX file, all of them together."""
    whole: bool = True
    """Also open what only a report needs; False where nothing but the placement is looked at."""
    values: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Values of inputs of an ONNX file, by name; the others are made up."""
    crashed: Mapping[str, str] = field(default_factory=dict)
    """Providers, by name, whose native code ended a process over this model, and how: they are left out."""
    dry: bool = False
    """Nothing is computed on a device, so floats that nobody gave are zeros, which take no memory until they are read.
    """


@dataclass(frozen=True, slots=True)
class _Ran:
    """What came of the runs of an ONNX file."""

    steps: tuple[StepFact, ...]
    """Those that worked."""
    error: PartitaError | None = None
    """Why the next did not; None for one that did not end after others did."""
    late: bool = False
    """The next did not end in time."""
    left: bool = False
    """Nor after that: a thread still runs the session."""


@dataclass(frozen=True, slots=True)
class Placed:
    """What was seen."""

    facts: RunFacts
    resolutions: tuple[Resolution, ...]
    """What became of each provider of the chain."""
    error: PartitaError | None
    """Why a run failed; the facts hold what was known until then."""


def place_model(model: OnnxModel, shapes: Mapping[str, Shape], where: Where) -> Placed:
    """Open a model on the chain and run it on inputs of these shapes.

    Raises ProviderError when the chain cannot be honoured, PackageError when ONNX Runtime cannot load the model,
    ResourceError when memory runs out.
    """
    if not where.dry:
        check_room(model.inputs, shapes, where.values)
    before = rss_bytes()
    renamed = model.to_bytes()
    resolutions = without_crashed(resolve(where.chain, available_ort_names(), where.options), where.crashed)
    session = open_session(model.path, resolutions, threads=where.threads, observe=True, pins=where.pins, model=renamed)
    with closing(session):
        after = rss_bytes()
        will_repeat(session)
        not_run = _not_run(model)
        crashed = where.crashed.get(RUN)
        opened_only = bool(not_run or crashed)
        ran, ports = _run_session(model, shapes, session, replace(where, runs=0) if opened_only else where)
        error, steps = ran.error, ran.steps
        if crashed and error is None:
            error = crashed_in_run(model, crashed, where.values)
        seen = _model_session_facts(model, session, ports, len(steps))
        facts = RunFacts(
            sessions=(seen,),
            states=(),
            steps=steps,
            memory=Memory(
                weight_bytes=model.weight_bytes,
                cache_bytes=0,
                rss_before_load_bytes=before,
                rss_after_load_bytes=after,
                peak_rss_bytes=max(peak_rss_bytes(), before, after),
            ),
            tokenizer_load_seconds=0.0,
            first_token_seconds=None,
            prompt_tokens=0,
            new_tokens=0,
            finish_reason=None,
            interrupted=cut_short(error),
            notes=(
                *model.notes,
                *not_run,
                *failure_notes(len(steps), where.runs, error),
                *(late_notes(len(steps), where.runs, where.run_seconds, left=ran.left) if ran.late else ()),
                *(unread_profile(len(steps), seen.runs) if not ran.left else ()),
            ),
        )
        whole = where.whole and not ran.left  # what a run holds that does not end, another session might wait for
        return Placed(with_graphs(facts, (session,), replace(where, whole=whole), error), session.resolutions, error)


def _not_run(model: OnnxModel) -> tuple[str, ...]:
    """A sentence about inputs for which no values can be made: the model is opened, and not run."""
    made = ((port.name, not_generated(port)) for port in model.inputs)
    lacking = [f"{name} is {what}" for name, what in made if what]
    if not lacking:
        return ()
    return (
        f"not run, so what only a run can tell is missing: no values can be generated for inputs: {listing(lacking)}",
    )


def _run_session(
    model: OnnxModel, shapes: Mapping[str, Shape], session: Session, where: Where
) -> tuple[_Ran, tuple[PortFact, ...]]:
    """What came of the runs; inputs and outputs.

    The binding ends here, before the session: values on a device that outlive their session end the process (WebGPU).
    """
    binding = session.binding()
    ran = _run_model(model, shapes, binding, where)
    if ran.left:
        session.leave()
    ports = _port_facts(model, session, binding, ran=bool(ran.steps) and not ran.left)
    let_go(ran.error)
    if isinstance(ran.error, GenerationError | ProviderError) and not isinstance(ran.error, NOT_FAILED):
        ran = replace(ran, error=told_error(model, session, ran.error, where.values))
    if isinstance(ran.error, ResourceError) and ran.error.remedy == SHORTER:  # an ONNX file has no cache to shorten
        ran = replace(ran, error=ResourceError(ran.error.said, remedy=SMALLER_INPUTS))
    return ran, ports


def _run_model(model: OnnxModel, shapes: Mapping[str, Shape], binding: Binding, where: Where) -> _Ran:
    """Run on given or generated inputs with fresh outputs, for as long as there is time.

    Inputs are bound before every run, as a caller with new data would: on a device, ONNX Runtime copies them then.
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
        for port in model.inputs if where.runs else ():
            buffers[port.name] = filled_buffer(model, port, shapes[port.name], where, rng)
        for name in model.outputs:
            binding.bind_fresh_output(name)
        until = time.monotonic() + where.run_seconds
        for _ in range(where.runs):
            in_time(step, binding.stop, until - time.monotonic())
    except KeyboardInterrupt:
        return _Ran(tuple(steps), RunInterruptedError(model.path), left=left(step))
    except LateError as late:
        error = None if steps else RunLateError(model, where.run_seconds, where.values)
        return _Ran(tuple(steps), error, late=True, left=late.left)
    except RUN_ERRORS as error:
        return _Ran(tuple(steps), error)
    return _Ran(tuple(steps))


def filled_buffer(model: OnnxModel, port: ModelPort, shape: Shape, where: Where, rng: np.random.Generator) -> Buffer:
    """An input in host memory with its values."""
    values, fitting = where.values.get(port.name), model.fitting.get(port.name)
    if port.dtype == STRING:
        return text_buffer(make_values(port, shape, rng) if values is None else values)
    buffer = host_buffer(shape, port.dtype)
    if values is None and where.dry and dtypes.is_float(port.dtype) and fitting is None:
        return buffer
    buffer.host[...] = make_values(port, shape, rng, fitting=fitting) if values is None else values
    return buffer


def _model_session_facts(model: OnnxModel, session: Session, ports: tuple[PortFact, ...], runs: int) -> SessionFacts:
    """Facts of the session of a model that is no package, after `runs` runs that worked. Ends profiling."""
    profile = session.end_profiling()
    events, windows = parse_profile(profile, [(PHASE, 0)] * runs) if profile else ((), ())
    return session_facts(
        session,
        session.resolutions,
        graph=model.nodes,
        inner=model.inner,
        file=model.path.name,
        phases=(PHASE,),
        ports=ports,
        events=events,
        runs=windows,
    )


def _port_facts(model: OnnxModel, session: Session, binding: Binding, *, ran: bool) -> tuple[PortFact, ...]:
    """Where inputs and outputs are wanted; all are in host memory, where a caller without device buffers has them."""
    wanted = session.wanted_memory
    sizes: dict[str, int | None] = {
        name: None if buffer.dtype == STRING else buffer.size_bytes for name, buffer in binding.buffers.items()
    }
    if ran:
        types = {port.name: port.type for port in session.outputs}
        sizes |= {name: output_bytes(types[name], shape) for name, shape in binding.output_shapes().items()}
    named = [("input", port.name) for port in model.inputs] + [("output", name) for name in model.outputs]
    return tuple(
        PortFact(name, direction, direction, wanted[name], HOST_MEMORY, sizes.get(name))
        for direction, name in named
        if name in wanted
    )


def output_bytes(type_text: str, shape: tuple[int, ...] | None) -> int | None:
    """Bytes of an output of ONNX Runtime's type, e.g. tensor(float); None for strings and for what is no tensor."""
    element = type_text.removeprefix("tensor(").removesuffix(")")
    return None if shape is None or dtypes.bits_of(element) is None else dtypes.size_bytes(element, shape)


def place_package(folder: Path, where: Where, manifest: Manifest | None = None) -> Placed:
    """Open a package on the chain and run its prefill and decode graphs on dummy tokens; no logits are looked at.

    `manifest`: that of a folder that has none on disk.
    Raises PackageError, ProviderError, ResourceError.
    """
    with load_runner(
        folder,
        where.chain,
        threads=where.threads,
        observe=True,
        manifest=manifest,
        options=where.options,
        pins=where.pins,
        crashed=where.crashed,
        wants_tokens=False,
    ) as runner:
        error = run_package(runner, where.runs)
        let_go(error)
        facts = run_facts(runner, notes=failure_notes(len(runner.steps), 2 * where.runs, error))
        facts = with_graphs(facts, [entry.session for entry in runner.graphs], where, error)
        # Nobody asked for tokens, so none are told of.
        facts = replace(facts, finish_reason=None, new_tokens=0, first_token_seconds=None)
        return Placed(replace(facts, interrupted=cut_short(error)), runner.resolutions, error)


def with_graphs(facts: RunFacts, sessions: Sequence[Session], where: Where, error: PartitaError | None) -> RunFacts:
    """The facts with the graphs as ONNX Runtime runs them; not where memory has run out, or patience."""
    wanted = where.whole and not isinstance(error, ResourceError | RunInterruptedError)
    return with_optimised(facts, sessions) if wanted else facts


def run_package(runner: Runner, runs: int) -> PartitaError | None:
    """`runs` prompts, each read in one step, then `runs` decode steps after the last; why one failed.

    Through the engine that generates, so what is placed is the loop that a user runs.
    """
    engine = Engine(runner.executor, PREFILL_TOKENS, (runner,))
    graphs = runner.executor.graphs
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


def _begin(engine: Engine, tokens: int) -> None:
    """Begin a dummy prompt of so many tokens in every row; what was in it has left."""
    taken = [row for row, request in enumerate(engine.rows) if request is not None]
    for row in taken:
        engine.leave(row)
    budget = engine.executor.graphs.max_length  # never reached: rows go on for as long as the cache has room
    for _ in engine.rows:
        engine.join(Request([DUMMY_TOKEN] * tokens, _dummy, budget, any_logits=True))


def _dummy(logits: npt.NDArray[np.float32], history: npt.NDArray[np.int64]) -> int:
    """The next token, whatever the logits are: nothing is computed where a device is played."""
    return DUMMY_TOKEN


def decode(engine: Engine) -> None:
    """One decode step. In a full cache every row goes back by a token, or begins anew where it cannot.

    None is made in a cache that is full again right after that: one of two tokens, of which no row can go back.
    """
    anew = False
    while (step := engine.step()) is None or step.phase != "decode":
        if step is not None or all(engine.rewind(row, 1) for row in range(len(engine.rows))):
            continue
        if anew:
            return
        _begin(engine, 1)
        anew = True


def with_shapes(
    facts: RunFacts, models: Mapping[str, OnnxModel], shapes: Mapping[str, Mapping[str, Shape]]
) -> RunFacts:
    """The facts with what a dry run needs besides: constants, and tensors whose shape follows from the inputs.

    `models` and `shapes` (of inputs) go by file name.
    """
    sessions = tuple(
        replace(
            session,
            constants=models[session.file].constants,
            fixed_shapes=fixed_shapes(models[session.file].proto, shapes.get(session.file, {})),
        )
        for session in facts.sessions
    )
    return replace(facts, sessions=sessions)


def package_models(folder: Path, facts: RunFacts) -> dict[str, OnnxModel]:
    """The ONNX files of a package, by name."""
    return {session.file: read_onnx(folder / session.file) for session in facts.sessions}
