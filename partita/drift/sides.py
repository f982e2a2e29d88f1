"""Runs a graph on one side of a comparison and returns its tensors; also the program of a worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.providers.base import Provider
from partita.providers.resolve import known_providers, resolve
from partita.runtime.chain.open_chain import idle_providers, open_session
from partita.runtime.chain.pins import parse_pins
from partita.runtime.ort.buffers import Buffer, host_buffer
from partita.runtime.ort.registry import available_ort_names, ort_build
from partita.runtime.place.model_file import read_model_file

ASSIGNED_NONE = "it was assigned no nodes; partita place shows why"


@dataclass(frozen=True, slots=True)
class Step:
    """One run of a graph."""

    name: str
    file: str
    feeds: Mapping[str, npt.NDArray[Any]]
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
    runs_graphs = True
    """Whether any graph can be run, and any tensor be read."""

    @property
    def name(self) -> str:
        """The chain, with the environment if it is another."""
        names = ",".join(provider.name for provider in self.chain)
        return f"{names} in {self.place}" if self.place else names

    def run(
        self,
        step: Step,
        model: bytes | None,
        feeds: Mapping[str, npt.NDArray[Any]],
        outputs: Sequence[str] | None = None,
        ours: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        shared: Mapping[str, str] | None = None,
    ) -> GraphRun:
        """Run a model on this side; see `run_graph`. `ours`: the tested side's tensors, if this is the reference."""
        shared = step.shared if shared is None else shared
        return (self.call or run_graph)(replace(self, call=None), step.file, model, feeds, outputs, shared)


def with_provider(side: Side, ort_name: str) -> Side:
    """The side with a provider at the end of its chain, if it is missing."""
    if any(entry.ort_name == ort_name for entry in side.chain):
        return side
    other = next(entry for entry in known_providers().values() if entry.ort_name == ort_name)
    return replace(side, chain=(*side.chain, other))


def run_graph(
    side: Side,
    file: str,
    model: bytes | None,
    feeds: Mapping[str, npt.NDArray[Any]],
    outputs: Sequence[str] | None = None,
    shared: Mapping[str, str] | None = None,
) -> GraphRun:
    """Run a graph once and return these outputs (None: all).

    `model`: opened instead of the file. `feeds`: arrays in their storage type. `shared`: outputs that write the buffer
    of an input. Raises PackageError, ProviderError, ResourceError, UsageError; GenerationError when the run fails.
    """
    resolutions = resolve(side.chain, available_ort_names(), side.options)
    pins = parse_pins(side.pins, side.chain)
    path = side.folder / file
    session = open_session(path, resolutions, threads=side.threads, observe=False, pins=pins, model=model)
    with closing(session):
        types = {port.name: _element(port.type) for port in (*session.inputs, *session.outputs)}
        binding = session.binding()
        held: dict[str, Buffer] = {}
        for port in session.inputs:
            array = feeds[port.name]
            buffer = host_buffer(array.shape, types[port.name])
            buffer.host[...] = array
            held[port.name] = buffer
        skipped, bound = {}, []
        for port in session.outputs:
            if outputs is not None and port.name not in outputs:
                continue
            if not _is_readable(types[port.name]):
                skipped[port.name] = port.type
                continue
            past = (shared or {}).get(port.name, "")
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
        active = [entry for entry in session.resolutions if entry.status == "active"]
        unused = {
            entry.provider.name: f"{entry.reason}: {entry.evidence}"
            for entry in session.resolutions
            if entry not in active
        }
        if outputs is None:
            unused |= dict.fromkeys(idle_providers(session, read_model_file(path, path.parent)), ASSIGNED_NONE)
        placed = {node.name: node.provider for node in session.assigned() or ()}
        binding.release()  # device memory that outlives its session crashes WebGPU
        held.clear()
    return GraphRun(values, skipped, placed, unused, ort_build().version)


def _element(text: str) -> str:
    """The element type of ONNX Runtime's type; the type itself if it is no tensor."""
    return dtypes.usual(text.removeprefix("tensor(").removesuffix(")")) if text.startswith("tensor(") else text


def _is_readable(name: str) -> bool:
    """Whether numpy holds tensors of a type."""
    element = dtypes.find(name)
    return element is not None and element.storage == name and element.kind != "complex"


HANDLERS = {"run_graph": run_graph}
