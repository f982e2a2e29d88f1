"""The source model as a reference: inputs and outputs of its modules, joined with tensors of the graph by module path.

A tensor is joined if it is the only one that enters or leaves the nodes of a module, or if as many leave it as the
module returns. The graph may compute others in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.drift.graphs import PartedGraph
from partita.drift.sides import GraphRun, Side, Step
from partita.runtime.place.onnx_model import read_onnx

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
        self,
        step: Step,
        model: bytes | None,
        feeds: Mapping[str, npt.NDArray[Any]],
        outputs: Sequence[str] | None = None,
        ours: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        shared: Mapping[str, str] | None = None,
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
