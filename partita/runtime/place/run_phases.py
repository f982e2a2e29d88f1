"""Opens any ONNX model or package, runs it a few times, and returns facts for a report.

A package is run by the generation engine on dummy token ids, another model on given or generated inputs in host memory.
The facts of an opened session are returned even when its run fails.
"""

from __future__ import annotations

import math
import re
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.errors import INTERRUPTED, GenerationError, PartitaError, ProviderError, ResourceError
from partita.observations.codes import Interruption
from partita.observations.facts import PortFact, RunFacts, StepFact
from partita.observations.names import CPU, RUN
from partita.observations.records import Memory
from partita.observations.text_format import listing, plural
from partita.package.folder import Manifest
from partita.process import peak_rss_bytes, rss_bytes
from partita.providers.base import Provider
from partita.providers.resolve import Resolution, parse_chain, resolve
from partita.remedies import Remedy
from partita.runtime.chain.cpu_settings import will_repeat
from partita.runtime.chain.open_chain import open_session
from partita.runtime.chain.pins import Pin
from partita.runtime.chain.provider_state import without_crashed
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.record import session_facts
from partita.runtime.generate.request import Request
from partita.runtime.generate.run_facts import can_load_again, run_facts, with_optimised
from partita.runtime.generate.runner import Runner, load_runner
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import HOST_MEMORY, Buffer, host_buffer
from partita.runtime.ort.errors import SHORTER, one_line
from partita.runtime.ort.native_log import parse_profile, unread_profile
from partita.runtime.ort.registry import available_ort_names, model_compatibility
from partita.runtime.ort.session import NativeFailureError, Session, open_native
from partita.runtime.place.inputs import SEED, Shape, check_free_memory, make_values, not_generated
from partita.runtime.place.onnx_model import OnnxModel
from partita.runtime.time_limit import LateError, in_time, is_still_running

PHASE = "run"
PREFILL_TOKENS = 16
"""Dummy prompt length in tokens if the graph supports any number of tokens."""
DUMMY_TOKEN = 0
SIZES = re.compile(r"\b(shapes?|dimensions?|dims?|rank|broadcast\w*|sizes?|axis|out of bounds)\b", re.IGNORECASE)
"""Matches a message about sizes: other sizes may help."""
NODE_FAILED = re.compile(r"while running (\S+) node\. Name:'(.*?)' Status Message: (.*)", re.DOTALL)
SMALLER_INPUTS = Remedy("free memory, or set smaller input sizes")
OTHER_INPUTS = "set other sizes with `shapes=NAME=SIZES`, or other values with `inputs=NAME=FILE.npy`"
WITHOUT_PROVIDER = Remedy("run it without that provider", options=("--provider", "{chain}"))
RUN_ERRORS = (GenerationError, ProviderError, ResourceError)


class RunInterruptedError(GenerationError):
    """Ctrl-C interrupted the run after the session was opened."""

    exit_code = INTERRUPTED

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: interrupted before its runs finished")


class RunLateError(GenerationError):
    """A run did not end within the time limit."""


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
class PlacementFacts:
    """Facts of a placement."""

    facts: RunFacts
    resolutions: tuple[Resolution, ...]
    """State of each provider of the chain."""
    error: PartitaError | None
    """Error of a run; the facts are of earlier runs."""


def place_model(model: OnnxModel, shapes: Mapping[str, Shape], opening: OpenOptions) -> PlacementFacts:
    """Open a model on the chain and run it on inputs of these shapes.

    Raises ProviderError when the chain cannot be honoured, PackageError when ONNX Runtime cannot load the model,
    ResourceError when memory runs out.
    """
    lazy = {port.name for port in model.inputs if opening.dry_run and dtypes.is_float(port.dtype)}
    check_free_memory(model.inputs, shapes, lazy.union(opening.values))
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
        made = FileRun(model, session, opening)
        made.run(shapes, 0 if not_run or RUN in opening.crashed else opening.runs)
        profile = session.end_profiling()
        events, windows = parse_profile(profile, [(PHASE, 0)] * len(made.steps)) if profile else ((), ())
        seen = session_facts(
            session,
            session.resolutions,
            graph=model.nodes,
            subgraph_nodes=model.subgraph_nodes,
            file=model.path.name,
            phases=(PHASE,),
            ports=made.ports,
            events=events,
            runs=windows,
        )
        compiled = model_compatibility({entry.key: entry.value for entry in model.proto.metadata_props})
        about_runs = run_notes(len(made.steps), opening.runs, made.error, hangs=made.hangs)
        unread = () if made.hangs else unread_profile(len(made.steps), seen.runs)
        facts = RunFacts(
            sessions=(seen,),
            steps=tuple(made.steps),
            memory=Memory(
                weight_bytes=model.weight_bytes,
                cache_bytes=0,
                rss_before_load_bytes=before,
                rss_after_load_bytes=after,
                peak_rss_bytes=max(peak_rss_bytes(), before, after),
            ),
            interruptions=("runs",) if isinstance(made.error, RunInterruptedError) else (),
            notes=(*model.notes, *compiled, *session.notes, *not_run, *about_runs, *unread),
        )
        error = None if isinstance(made.error, RunLateError) and made.steps else made.error
        if not made.hangs:  # a second session could wait for a run that does not end
            facts = with_graphs(facts, (session,), error)
        return PlacementFacts(facts, session.resolutions, error)


@dataclass
class FileRun:
    """Runs of an ONNX file on given or generated inputs in host memory."""

    model: OnnxModel
    session: Session
    opening: OpenOptions
    steps: list[StepFact] = field(default_factory=list)
    """Complete runs."""
    error: PartitaError | None = None
    """The error of the run after them."""
    ports: tuple[PortFact, ...] = ()
    hangs: bool = False
    """Whether a run is still running."""

    def run(self, shapes: Mapping[str, Shape], runs: int) -> None:
        """Run on inputs of these shapes, within the time limit.

        Inputs are bound before every run, as with new data, so that each run includes the copy to a device. The binding
        is released before the session, because device values that outlive their session crash WebGPU.
        """
        binding, path = self.session.binding(), self.model.path
        buffers: dict[str, Buffer] = {}

        def step() -> None:
            began = time.perf_counter()
            for name, buffer in buffers.items():
                binding.bind_input(name, buffer)
            bound = time.perf_counter()
            binding.run()
            self.steps.append(StepFact(PHASE, 0, time.perf_counter() - bound, bound - began, observed=True))

        if crash := self.opening.crashed.get(RUN):
            self.error = GenerationError(
                f"{path}: {crash}, on {self._values()}; the model opens without a run, so the node placement is valid; "
                "set other values with `inputs=NAME=FILE.npy`"
            )
        try:
            if runs:
                buffers.update(self._inputs(shapes))
            for name in self.model.outputs:
                binding.bind_fresh_output(name)
            until = time.monotonic() + self.opening.run_seconds
            for _ in range(runs):
                with self.session.listening(PHASE):
                    in_time(step, binding.stop, until - time.monotonic())
        except KeyboardInterrupt:
            self.error = RunInterruptedError(path)
        except LateError:
            self.error = RunLateError(
                f"{path}: a run on {self._values()} did not end within {self.opening.run_seconds:g} s; the node "
                "placement is valid, but measurements are missing; set other values with `inputs=NAME=FILE.npy`, or a "
                "longer limit with `run_seconds`"
            )
        except RUN_ERRORS as failed:
            self.error = self._error_of(failed, binding)
        release_frames(self.error)
        if is_still_running(step):
            self.hangs, self.session.profiling = True, False  # `close` will not wait for the run or read its profile
        self.ports = self._port_facts(binding)

    def _inputs(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Buffer]]:
        """Buffers of the inputs, with their values; in a dry run, generated floats are untouched zeros."""
        rng = np.random.default_rng(SEED)
        for port in self.model.inputs:
            shape, values = shapes[port.name], self.opening.values.get(port.name)
            buffer = host_buffer(shape, port.dtype)
            if values is not None or not self.opening.dry_run or not dtypes.is_float(port.dtype):
                buffer.host[...] = make_values(port, shape, rng) if values is None else values
            yield port.name, buffer

    def _values(self) -> str:
        """The origin of the input values, for a message."""
        given = self.opening.values
        generated = [port.name for port in self.model.inputs if port.name not in given]
        if not given:
            return "generated inputs"
        values = f"the given values of {listing(given)}"
        return f"{values} and generated values of {listing(generated)}" if generated else values

    def _port_facts(self, binding: Binding) -> tuple[PortFact, ...]:
        """Required memory of inputs and outputs; all are bound in host memory."""
        memory = self.session.required_memory
        sizes: dict[str, int | None] = {name: buffer.size_bytes for name, buffer in binding.buffers.items()}
        shapes = binding.output_shapes() if self.steps and not self.hangs else {}
        for port in self.session.outputs if shapes else ():
            element, shape = port.type.removeprefix("tensor(").removesuffix(")"), shapes[port.name]
            if shape is None or dtypes.bits_of(element) is None:  # a sequence, or strings
                sizes[port.name] = None
            else:
                sizes[port.name] = dtypes.size_bytes(element, shape)
        named = [("input", port.name) for port in self.model.inputs] + [("output", name) for name in self.model.outputs]
        return tuple(
            PortFact(name, direction, direction, memory[name], HOST_MEMORY, sizes.get(name))
            for direction, name in named
            if name in memory
        )

    def _error_of(self, error: PartitaError, binding: Binding) -> PartitaError:
        """The error of a failed run: of a provider if the CPU provider runs the same inputs, else of the inputs.

        If that is unknown, it is of the provider if the message is about a node of it, and not about sizes.
        """
        release_frames(error)
        if isinstance(error, ResourceError):  # an ONNX file has no cache to shorten
            return ResourceError(error.message, remedy=SMALLER_INPUTS) if error.remedy == SHORTER else error
        text = one_line(str(error.__cause__ or error))
        active = [entry.provider for entry in self.session.resolutions if entry.status == "active"]
        others = [provider.ort_name for provider in active if provider.ort_name != CPU]
        found = NODE_FAILED.search(text)
        listed = {node.name: node.provider for node in self.session.assigned()}
        failing = (listed.get(found[2]) if found else None) or (others[0] if others else CPU)
        what, message = (f"node {found[2]!r} ({found[1]})", found[3]) if found else ("the model", text)
        on_cpu = self._runs_on_cpu(binding) if others else False
        converted: PartitaError
        if on_cpu or (on_cpu is None and found and failing != CPU and not SIZES.search(message)):
            known = ", and the CPU provider can" if on_cpu else ""
            if failing == CPU:  # with values that another provider computed
                failing, known = others[0], f" without a failure of {what}; on the CPU provider alone it runs"
                what = "the model"
            rest = [provider.name for provider in active if provider.ort_name != failing]
            converted = ProviderError(
                f"{failing} cannot run {what}{known}: {message}",
                path=self.model.path,
                remedy=WITHOUT_PROVIDER.filled(chain=",".join(rest) or "cpu"),
            )
        elif isinstance(error, ProviderError):
            converted = ProviderError(f"{self.model.path}: a run failed: {text}; use another provider")
        else:
            converted = GenerationError(f"{self.model.path}: a run on {self._values()} failed: {text}; {OTHER_INPUTS}")
        converted.__cause__ = error.__cause__
        return converted

    def _runs_on_cpu(self, binding: Binding) -> bool | None:
        """Whether the CPU provider runs the model on the bound inputs; None if unknown, also without free memory."""
        if not can_load_again(self.model.weight_bytes):
            return None
        opening = replace(self.session.opening, observe=False, strict=False, config={})
        try:
            other = open_native(self.model.path, resolve(parse_chain("cpu"), (CPU,)), opening)
        except NativeFailureError:
            return None
        with closing(other), suppress(TypeError, ValueError):  # an input of a type that numpy lacks
            outputs, _ = other.run_once({port.name: binding.buffers[port.name].host for port in self.model.inputs})
            return outputs is not None
        return None


def release_frames(error: BaseException | None) -> None:
    """Release the objects in the frames of an exception and its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def run_notes(done: int, runs: int, error: PartitaError | None, *, hangs: bool = False) -> tuple[str, ...]:
    """The note for a run that failed, was interrupted or exceeded the time limit; `hangs`: it still runs."""
    if error is None:
        return ()
    how = {RunInterruptedError: "was interrupted", RunLateError: "did not end"}.get(type(error), "failed")
    if done and isinstance(error, RunLateError):
        lost = "; times of nodes and copies are missing because ONNX Runtime writes its profile after the last run"
        late = f"run {done + 1} of {runs} exceeded the time limit, so the measurements are of {plural(done, 'run')}"
        return (f"{late}{lost if hangs else ''}",)
    return (f"run {done + 1} of {runs} {how}, so measurements of complete runs are missing: {error}",)


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
        facts = run_facts(runner, notes=run_notes(len(runner.recorder.steps), 2 * opening.runs, error))
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
            _decode(engine)
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


def _decode(engine: GenerationLoop) -> None:
    """Run one decode step. With a full cache, a new prompt of one token is begun first.

    A cache of two tokens, which is full again at once, gets no decode step.
    """
    for _ in range(2):
        while (step := engine.step()) is not None:
            if step.phase == "decode":
                return
        _begin(engine, 1)
