"""Parts of a graph that are compared: layers or single nodes, with the tensors between them.

A part is cut out as a model of its own whose inputs are the reference's tensors, so an error of an earlier part does
not reach it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from partita import dtypes
from partita.runtime.lab.graph import rename
from partita.runtime.place.model_file import graph_node, subgraphs_of, tensors_read
from partita.runtime.place.onnx_model import OnnxModel

LOCAL = ".local"
"""Suffix of the tensors that a cut part computes."""
RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
MOST_EMBEDDED = 16
"""Elements of an integer vector, e.g. the target of a Reshape, that is a constant of a cut part: some providers need
it, and in a graph with fixed sizes ONNX Runtime folds it."""
Values = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes that are compared together: a layer, or one node."""

    name: str
    nodes: tuple[int, ...]
    """Positions in the graph."""
    inputs: tuple[str, ...]
    """Tensors of graph inputs and other parts."""
    outputs: tuple[str, ...]
    """Tensors that other parts read, or outputs of the graph."""


class PartedGraph:
    """The main graph of a model and its parts."""

    def __init__(self, model: OnnxModel) -> None:
        self.model, self.proto = model, model.proto
        self.nodes = list(model.proto.graph.node)
        self.inputs, self.outputs = frozenset(port.name for port in model.inputs), frozenset(model.outputs)
        functions = {(entry.domain, entry.name) for entry in self.proto.functions}
        self.constants = {entry.name for entry in self.proto.graph.initializer}
        self.constants |= {entry.values.name for entry in self.proto.graph.sparse_initializer}
        self.compared: list[int] = []
        """Positions of nodes that are not folded. ONNX Runtime folds a node that reads constants alone."""
        self._makers: dict[str, int] = {}
        self._users: dict[str, list[int]] = {}
        for position, node in enumerate(self.nodes):
            own = (node.domain, node.op_type) in functions or node.domain not in ("", "ai.onnx")
            stays = own or node.op_type in RANDOM or node.op_type == "DequantizeLinear" or any(subgraphs_of(node))
            if stays or not all(name in self.constants for name in node.input if name):
                self.compared.append(position)
            else:
                self.constants.update(filter(None, node.output))
            self._makers |= {name: position for name in node.output if name}
            for name in tensors_read(node):
                self._users.setdefault(name, []).append(position)

    def layers(self) -> list[Part]:
        """Nodes by the module path up to its first number; without module paths, runs of nodes.

        A node without a module counts to the node before it.
        """
        modules = {position: graph_node(self.nodes[position]).module for position in self.compared}
        if 2 * sum(module is not None for module in modules.values()) < len(modules):
            return self._runs()
        keys: dict[str, list[int]] = {}
        key = next(layer_path(module) for module in modules.values() if module)
        for position, module in modules.items():
            key = layer_path(module) if module else key
            keys.setdefault(key, []).append(position)
        return [self.part(name, positions) for name, positions in keys.items()]

    def _runs(self) -> list[Part]:
        """Runs of about sqrt(n) nodes in file order."""
        size = max(1, math.isqrt(len(self.compared)))
        return [self._span(self.compared[at : at + size]) for at in range(0, len(self.compared), size)]

    def single_nodes(self, positions: Iterable[int], known: Collection[str] | None = None) -> list[Part]:
        """One part per node. Random nodes are left out: their values differ from run to run.

        `known`: only these tensors can be compared. Nodes in sequence are one part if they end with known tensors, or
        with tensors that do not depend on known ones.
        """
        singles = [self._span([at]) for at in positions if self.nodes[at].op_type not in RANDOM]
        return singles if known is None else self._merged(singles, known)

    def _merged(self, singles: Iterable[Part], known: Collection[str]) -> list[Part]:
        parts: list[Part] = []
        pending: list[int] = []
        inside: set[str] = set()
        depends = {*known}
        for single in singles:
            depends.update(single.outputs if depends.intersection(single.inputs) else ())
            if inside.isdisjoint(single.inputs) and depends.intersection(single.outputs) <= {*known, *self.outputs}:
                parts.append(single)
                continue
            pending += single.nodes
            inside.update(single.outputs)
            part = self._span(pending)
            if depends.intersection(part.outputs) <= {*known, *self.outputs}:
                parts.append(part)
                pending, inside = [], set()
        return [*parts, self._span(pending)] if pending else parts

    def _span(self, positions: Sequence[int]) -> Part:
        """Nodes in sequence, named for the first and the last."""
        first, last = self.nodes[positions[0]].name, self.nodes[positions[-1]].name
        return self.part(first if first == last else f"{first} to {last}", positions)

    def open_part(self, part: Part) -> Part:
        """The part with every tensor of its nodes as an output."""
        return replace(part, outputs=tuple(name for at in part.nodes for name in self.nodes[at].output if name))

    def part(self, name: str, positions: Sequence[int]) -> Part:
        """The nodes at these positions, with the tensors that they read and that others read of them."""
        inside = set(positions)
        made = {output for at in positions for output in self.nodes[at].output if output}
        read = dict.fromkeys(name for at in positions for name in tensors_read(self.nodes[at]))
        random = {entry for at in positions if self.nodes[at].op_type in RANDOM for entry in self.nodes[at].output}
        shared = [
            output
            for at in positions
            for output in self.nodes[at].output
            if output and output not in random
            if output in self.outputs or not inside.issuperset(self._users.get(output, ()))
        ]
        return Part(
            name,
            tuple(positions),
            tuple(entry for entry in read if entry not in made and entry not in self.constants),
            tuple(shared),
        )

    def with_sources(self, positions: Sequence[int], known: Collection[str]) -> list[int]:
        """The nodes and all nodes between known tensors and them."""
        found, pending = set(positions), [*positions]
        while pending:
            read = {name for name in tensors_read(self.nodes[pending.pop()]) if name not in known}
            more = {self._makers[name] for name in read & self._makers.keys()} - found
            found |= more
            pending += more
        return sorted(found)

    def module(self, position: int) -> str | None:
        """Module path of a node."""
        return graph_node(self.nodes[position]).module

    def with_outputs(self, tensors: Collection[str]) -> bytes:
        """The model with these tensors as further outputs."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        added = [name for name in tensors if name not in self.outputs and name not in self.inputs]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in added)
        return bytes(proto.SerializeToString())

    def submodel(self, parts: Sequence[Part], values: Values) -> bytes:
        """A model of these parts alone. Each reads `values`, the reference's tensors, and computes its own tensors,
        whose names end with LOCAL.
        """
        proto = onnx.ModelProto()
        for name in ("ir_version", "producer_name"):
            setattr(proto, name, getattr(self.proto, name))
        proto.opset_import.extend(self.proto.opset_import)
        proto.functions.extend(self.proto.functions)
        graph, whole = proto.graph, self.proto.graph
        graph.name = whole.name
        inputs = dict.fromkeys(name for part in parts for name in part.inputs)
        own = {at for part in parts for at in part.nodes}
        graph.node.extend(self.nodes[at] for at in self.with_sources([*own], inputs.keys()) if at not in own)  # folded
        for part in parts:
            made = {name: name + LOCAL for at in part.nodes for name in self.nodes[at].output if name}
            for position in part.nodes:
                node = deepcopy(self.nodes[position])
                rename(node, made)
                node.output[:] = [made.get(name, name) for name in node.output]
                graph.node.append(node)
            graph.output.extend(onnx.ValueInfoProto(name=made[name]) for name in part.outputs)
        read = {name for node in graph.node for name in tensors_read(node)}
        graph.initializer.extend(entry for entry in whole.initializer if entry.name in read)
        graph.sparse_initializer.extend(entry for entry in whole.sparse_initializer if entry.values.name in read)
        declared = {port.name: port for port in whole.input}
        for name in inputs:
            array = values[name]
            if name not in self.inputs and array.ndim < 2 and array.size <= MOST_EMBEDDED and array.dtype.kind in "iub":
                graph.initializer.append(numpy_helper.from_array(array, name))
                continue
            element = declared[name].type.tensor_type.elem_type if name in declared else None
            number = element or dtypes.dtype_named(array.dtype.name).number
            graph.input.append(helper.make_tensor_value_info(name, number, array.shape))
        return bytes(proto.SerializeToString())


def layer_path(module: str) -> str:
    """The module path up to its first number: model.layers.3 of model.layers.3.mlp."""
    parts = module.split(".")
    at = next((position for position, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: at + 1])
