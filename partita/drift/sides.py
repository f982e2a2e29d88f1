"""Runs a graph on one side of a comparison and returns its tensors; also the program of a worker process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.drift.graphs import PartedGraph, Values
from partita.errors import PartitaError
from partita.package.folder import KNOWN_ANSWER, Manifest
from partita.package.known_answer import read_known_answer
from partita.providers.base import Provider
from partita.providers.resolve import known_providers, resolve
from partita.runtime.chain.open_chain import idle_providers, open_session
from partita.runtime.chain.pins import parse_pins
from partita.runtime.generate.cache import moves
from partita.runtime.generate.feeds import port_by_role
from partita.runtime.generate.loop import serve
from partita.runtime.generate.request import Request
from partita.runtime.generate.runner import load_runner
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import Buffer, host_buffer
from partita.runtime.ort.registry import available_ort_names, ort_build
from partita.runtime.place.inputs import SEED, Shape, make_values
from partita.runtime.place.model_file import read_model_file
from partita.runtime.place.onnx_model import OnnxModel, read_onnx

ASSIGNED_NONE = "it was assigned no nodes; partita place shows why"


@dataclass(frozen=True, slots=True)
class Step:
    """One run of a graph."""

    name: str
    file: str
    feeds: Values
    """Inputs in their storage type."""
    states: Mapping[str, str] = field(default_factory=dict)
    """Present states and the past states that they become."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Present states that are written in the buffer of the past state."""
    tokens: tuple[int, ...] = ()
    """Tokens of a row, without padding."""
    positions: tuple[int, ...] = ()
    """Positions of the tokens in the text."""
    logits: tuple[int, ...] = ()
    """Positions in the text of the tokens whose logits are computed."""


@dataclass(frozen=True, slots=True)
class GraphRun:
    """The result of one run."""

    values: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Outputs that numpy cannot hold, with ONNX Runtime's type."""
    placement: dict[str, str] = field(default_factory=dict)
    """Providers by node; ONNX Runtime may not list all nodes."""
    unused: dict[str, str] = field(default_factory=dict)
    """Providers of the chain without nodes, and the reason; complete in a run of all outputs only."""
    version: str = ""
    """Of ONNX Runtime; empty if it did not run."""


@dataclass(frozen=True)
class Side:
    """Where a side runs."""

    folder: Path
    """Folder of the graphs."""
    chain: tuple[Provider, ...]
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Provider options by provider name."""
    pins: tuple[str, ...] = ()
    threads: int | None = None
    place: str = ""
    """Name of the environment, if it is another."""
    call: Callable[..., GraphRun] | None = None
    """Calls `run_graph` in another environment; None: this process."""
    weight_bits: int | None = None
    """Bits of the tested side's quantised weights, if they are not rounded on this side."""
    unread: dict[str, PartitaError] = field(default_factory=dict, compare=False)
    """Tensors that it cannot give as outputs, with the error of a run."""
    runs_graphs = True
    """Whether any graph can be run, and any tensor be read."""

    @property
    def name(self) -> str:
        """The chain, with the environment if it is another."""
        names = ",".join(provider.name for provider in self.chain)
        return f"{names} in {self.place}" if self.place else names

    def run(
        self, step: Step, model: bytes | None, outputs: Sequence[str] | None = None, ours: Values | None = None
    ) -> GraphRun:
        """Run a model on this side; see `run_graph`. `ours`: the tested side's tensors, if this is the reference."""
        return (self.call or run_graph)(replace(self, call=None), step, model, outputs)


def with_provider(side: Side, ort_name: str) -> Side:
    """The side with a provider at the end of its chain, if it is missing."""
    if any(entry.ort_name == ort_name for entry in side.chain):
        return side
    other = next(entry for entry in known_providers().values() if entry.ort_name == ort_name)
    return replace(side, chain=(*side.chain, other))


def run_graph(side: Side, step: Step, model: bytes | None, outputs: Sequence[str] | None) -> GraphRun:
    """Run a model of the step's graph (None: its file) or of parts of it, and return these outputs (None: all).

    Raises PackageError, ProviderError, ResourceError, UsageError; GenerationError when the run fails.
    """
    resolutions = resolve(side.chain, available_ort_names(), side.options)
    pins = parse_pins(side.pins, side.chain)
    path = side.folder / step.file
    session = open_session(path, resolutions, threads=side.threads, observe=False, pins=pins, model=model)
    with closing(session):
        types = {port.name: _element(port.type) for port in (*session.inputs, *session.outputs)}
        binding = session.binding()
        held: dict[str, Buffer] = {}
        for port in session.inputs:
            held[port.name] = host_buffer(step.feeds[port.name].shape, types[port.name])
            held[port.name].host[...] = step.feeds[port.name]
        skipped, bound = {}, []
        for port in session.outputs:
            if outputs is not None and port.name not in outputs:
                continue
            if not _is_readable(types[port.name]):
                skipped[port.name] = port.type
                continue
            past = step.shared.get(port.name, "")
            if past in held and held[past].array is not None:
                own = session.state_buffer(past, held[past].host.shape, types[past])
                if own.array is None:
                    own.write(held[past])
                    held[past] = own
                binding.bind_output(port.name, held[past])
            else:
                binding.bind_fresh_output(port.name)
            bound.append(port.name)
        for name, buffer in held.items():
            binding.bind_input(name, buffer)
        values = {}
        if bound:
            binding.run()
            binding.allocated()
            values = {name: np.array(binding.buffers[name].values()) for name in bound}
        left_out = [entry for entry in session.resolutions if entry.status != "active"]
        unused = {entry.provider.name: f"{entry.reason}: {entry.evidence}" for entry in left_out}
        if outputs is None:
            unused |= dict.fromkeys(idle_providers(session, read_model_file(path, path.parent)), ASSIGNED_NONE)
        placed = {node.name: node.provider for node in session.assigned() or ()}
        binding.release()  # device memory that outlives its session crashes WebGPU
        held.clear()
    return GraphRun(values, skipped, placed, unused, str(ort_build().version))


def _element(text: str) -> str:
    """The element type of ONNX Runtime's type; the type itself if it is no tensor."""
    return dtypes.usual(text.removeprefix("tensor(").removesuffix(")")) if text.startswith("tensor(") else text


def _is_readable(name: str) -> bool:
    """Whether numpy holds tensors of a type."""
    element = dtypes.find(name)
    return element is not None and element.storage == name and element.kind != "complex"


HANDLERS = {"run_graph": run_graph}


# Steps

PROMPT_TOKENS, NEW_TOKENS = 24, 3


def package_steps(reference: Side, manifest: Manifest) -> list[Step]:
    """Every step of a prompt and a few new tokens, as the reference runs them.

    The text is that of the package's known answer; without one, tokens spread over the vocabulary. Raises the errors of
    `load_runner` and of a run.
    """
    contract, folder = manifest.graph, reference.folder
    if manifest.foreign is None and (folder / KNOWN_ANSWER).is_file():
        answer = read_known_answer(folder)
        prompt, pick = answer.prompt.tolist(), answer.pick
    else:
        count = max(1, min(PROMPT_TOKENS, contract.max_length - NEW_TOKENS))
        prompt, pick = np.linspace(0, contract.vocab_size - 1, count, dtype=np.int64).tolist(), _most_likely
    steps: list[Step] = []
    states = {state.present: state.past for state in contract.states}
    shared = {state.present: state.past for state in contract.states if not moves(state)}
    chain, options = reference.chain, reference.options
    with load_runner(folder, chain, threads=reference.threads, manifest=manifest, options=options) as runner:
        for entry in runner.graphs:

            def record(binding: Binding, file: str = entry.graph.file) -> None:
                names = binding.inputs
                feeds = {name: np.array(binding.buffers[name].values()) for name in names}
                steps.append(Step("", file, feeds, states, shared))

            entry.session.watchers.append(record)
        roped = port_by_role(runner.graph("decode").graph, "rope_length") is not None
        length = min(NEW_TOKENS, contract.max_length - len(prompt))
        request = Request(prompt, pick, length, any_logits=True, rope_length=len(prompt) + length if roped else 0)
        numbers: Counter[str] = Counter()
        begin = 0
        for done in serve(runner, [request] * runner.rows, prefill_chunk=len(prompt)):
            numbers[done.phase] += 1
            positions = tuple(range(begin, begin + done.new_tokens))
            begin += done.new_tokens
            for at, step in enumerate(steps):
                if not step.name:
                    steps[at] = _in_text(step, f"{done.phase} {numbers[done.phase]}", positions, manifest)
    return steps


def _in_text(step: Step, name: str, positions: tuple[int, ...], manifest: Manifest) -> Step:
    """The step with its tokens, and the positions of the logits: the last one unless an input names them."""
    graph = next(graph for graph in manifest.graph.files if graph.file == step.file)
    tokens, rows = port_by_role(graph, "tokens"), port_by_role(graph, "logits_rows")
    row = () if tokens is None else tuple(map(int, step.feeds[tokens.name].reshape(-1)[: len(positions)]))
    logits = positions[-1:]
    if rows is not None and positions:
        logits = tuple(positions[0] + int(place) for place in step.feeds[rows.name].reshape(-1))
    return replace(step, name=name, tokens=row, positions=positions, logits=logits)


def _most_likely(logits: npt.NDArray[np.float32], history: npt.NDArray[np.int64]) -> int:
    return int(np.nan_to_num(logits).argmax())


def file_step(model: OnnxModel, shapes: Mapping[str, Shape], values: Values) -> Step:
    """One run of an ONNX file on given values; others are generated."""
    rng = np.random.default_rng(SEED)
    feeds = {
        port.name: np.asarray(values[port.name]) if port.name in values else make_values(port, shapes[port.name], rng)
        for port in model.inputs
    }
    return Step("run", model.path.name, feeds)


# Source model

ModuleValue = tuple[str, str, int, int]
"""Module path, `input` or `output`, index of the tensor, and number of all; 0: any number."""
RunModel = Callable[[Collection[ModuleValue]], Mapping[ModuleValue, npt.NDArray[Any]]]
"""Runs the source model on the text; returns [T, ...] float32 of the modules that ran once."""
SKIP_NORMS = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
SUM = 3
"""Output of a skip norm with the sum of its inputs, which the module of the norm has as its input."""


@dataclass(frozen=True)
class SourceModel(Side):
    """A reference that has the tensors of modules and runs no graphs."""

    run_model: RunModel = field(kw_only=True)
    label: str = field(kw_only=True)
    runs_graphs = False
    joined: dict[str, dict[str, list[ModuleValue]]] = field(default_factory=dict, kw_only=True)
    """By file, the module values of tensors."""

    @property
    def name(self) -> str:
        """The model with its versions."""
        return self.label

    def run(
        self, step: Step, model: bytes | None, outputs: Sequence[str] | None = None, ours: Values | None = None
    ) -> GraphRun:
        """The joined ones of these tensors, in the shapes and types of `ours`. Padding has the values of `ours`."""
        if step.file not in self.joined:
            self.joined[step.file] = module_values(PartedGraph(read_onnx(self.folder / step.file)), step.states)
        joined = self.joined[step.file]
        ours = {name: array for name, array in (ours or {}).items() if array.dtype.kind == "f"}
        wanted = {value for name in ours for value in joined.get(name, ())}
        found = self.run_model(wanted) if wanted else {}
        values = {}
        for name, array in ours.items():
            fitting = (fitted(found[value], array, step) for value in joined.get(name, ()) if value in found)
            fit = next((entry for entry in fitting if entry is not None), None)
            if fit is not None:
                values[name] = fit
        return GraphRun(values)


def module_values(graph: PartedGraph, states: Collection[str]) -> dict[str, list[ModuleValue]]:
    """The module values that a tensor can be, those of inner modules first.

    `states`: graph outputs that no module returns.
    """
    positions: dict[str, list[int]] = {}
    for position in graph.compared:
        path = (graph.module(position) or "").split(".")
        for length in range(1, len(path) + 1):
            positions.setdefault(".".join(path[:length]), []).append(position)
    positions.pop("", None)
    found: dict[str, list[ModuleValue]] = {}
    for module in sorted(positions, key=lambda path: -path.count(".")):
        part = graph.part(module, positions[module])
        enters = [name for name in part.inputs if name not in graph.inputs]
        leaves = [name for name in part.outputs if name not in states]
        node = graph.nodes[positions[module][-1]]
        if node.op_type in SKIP_NORMS and len(positions[module]) == 1:
            enters, leaves = [*node.output[SUM:]], [node.output[0]]
        if len(enters) == 1:
            found.setdefault(enters[0], []).append((module, "input", 0, 0))
        for index, name in enumerate(leaves):
            found.setdefault(name, []).append((module, "output", index, len(leaves) if len(leaves) > 1 else 0))
    return found


def fitted(value: npt.NDArray[Any], ours: npt.NDArray[Any], step: Step) -> npt.NDArray[Any] | None:
    """A module's value [T, ...] as the tensor `ours`, [B, S, ...] or [B * S, ...]; None if the sizes differ.

    The rows of a batch have the same text. The tokens of a step are followed by padding.
    """
    inner = value.shape[1:]
    if ours.shape[ours.ndim - len(inner) :] != inner:
        return None
    rows = ours.shape[0] if ours.ndim == len(inner) + 2 else 1
    per_row = rows * int(np.prod(inner))
    tokens = ours.size // per_row if per_row else 0
    for places in (step.positions, step.logits):
        padded = tokens > len(places) and places is step.positions
        if not places or max(places) >= len(value) or not (padded or tokens == len(places)):
            continue
        whole = ours.astype(np.float32).reshape(rows, tokens, *inner)
        whole[:, : len(places)] = value[list(places)]
        limit = np.finfo(ours.dtype).max
        return np.clip(whole, -limit, limit).astype(ours.dtype).reshape(ours.shape)
    return None
