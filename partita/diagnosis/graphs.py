"""The producer and the consumers of each tensor, in the file's graph and in the optimised graph. Pure.

In the optimised graph a copied tensor has two names, one per memory: `hidden` and `hidden_WebGpuExecutionProvider`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from partita.observations.facts import GraphNode

MEMCPY_OPS = frozenset({"MemcpyFromHost", "MemcpyToHost"})
FOLDED = frozenset({"Constant", "Shape", "Size"})
"""Operators that ONNX Runtime computes before a run; no executed node replaces them."""


@dataclass(frozen=True, slots=True)
class OptimisedGraph:
    """Nodes and tensors of the optimised graph of a session."""

    nodes: dict[str, GraphNode]
    producers: dict[str, str]
    """Tensor -> node that produces it; graph inputs and constants have none."""
    readers: dict[str, tuple[str, ...]]
    """Tensor -> nodes that read it."""
    unnamed_node_outputs: frozenset[str]
    """Output tensors of nodes without a name."""
    other_names: dict[str, str]
    """Name of a tensor in the optimised graph -> its other name, that of the ONNX file if it has the tensor."""

    def original(self, tensor: str) -> str:
        """The name of a tensor in the ONNX file; unchanged if the file has no such tensor."""
        return self.other_names.get(tensor, tensor)

    def with_file_tensors(self, names: Collection[str]) -> dict[str, GraphNode]:
        """Nodes of these names without copies, in topological order, with the names of tensors in the ONNX file."""
        nodes = (node for name, node in self.nodes.items() if name in names)
        return {
            node.name: replace(
                node,
                inputs=tuple(map(self.original, node.inputs)),
                outputs=tuple(map(self.original, node.outputs)),
            )
            for node in nodes
            if node.op_type not in MEMCPY_OPS
        }


def index_graph(nodes: Iterable[GraphNode], file: Iterable[GraphNode]) -> OptimisedGraph:
    """Index the nodes of an optimised graph. `file`: nodes of the ONNX file."""
    exported = list(file)
    known = {tensor for node in exported for tensor in (*node.inputs, *node.outputs)}
    by_name, unnamed = dict[str, GraphNode](), frozenset[str]()
    for node in nodes:
        by_name[node.name] = node
        unnamed = unnamed.union(() if node.name else node.outputs)
    makers = {tensor: node.name for node in by_name.values() for tensor in node.outputs if tensor}
    readers: dict[str, list[str]] = {}
    # The outputs of a Split that replaces Slices have the names of the Slices.
    split = {tensor for tensor, maker in makers.items() if maker != tensor}.difference(known)
    names = {node.name: node.outputs[0] for node in exported if node.name in split}
    for node in by_name.values():
        for tensor in dict.fromkeys(filter(None, node.inputs)):
            readers.setdefault(tensor, []).append(node.name)
        if node.op_type in MEMCPY_OPS:
            names |= _copied_names(node, known, names)
    return OptimisedGraph(by_name, makers, {tensor: tuple(found) for tensor, found in readers.items()}, unnamed, names)


def _copied_names(node: GraphNode, known: Collection[str], names: dict[str, str]) -> dict[str, str]:
    """The common name of both sides of a copy: the name in the file, else the shorter name."""
    sides = [tensor for tensor in (*node.inputs, *node.outputs) if tensor]
    if not sides:
        return {}
    of_file = [tensor for tensor in sides if tensor in known]
    chosen = of_file[0] if of_file else min(sides, key=len)
    chosen = names.get(chosen, chosen)
    return {tensor: chosen for tensor in sides if tensor != chosen}


def edges(nodes: Mapping[str, GraphNode]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Tensor -> name of the node that produces it, and tensor -> names of the nodes that read it."""
    makers: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for name, node in nodes.items():
        makers |= dict.fromkeys(filter(None, node.outputs), name)
        for tensor in filter(None, node.inputs):
            readers.setdefault(tensor, []).append(name)
    return makers, readers
