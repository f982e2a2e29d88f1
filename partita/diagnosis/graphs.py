"""The tensors of the file's graph and of the executed graph, and both graphs cut at the tensors that they share. Pure.

In the optimised graph a copied tensor has two names, one per memory: `hidden` and `hidden_WebGpuExecutionProvider`.
Fusion and changes of layout preserve the names of tensors, but not the names of nodes. The nodes between the cuts are a
region: its executed nodes compute the same tensors as its file nodes. A compiled subgraph is one executed node and one
entry of the assignment list, which names the nodes in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from partita.diagnosis import naming
from partita.observations.facts import AssignedNode, GraphNode
from partita.observations.grouping import grouped
from partita.observations.names import CPU, RENAMED

MEMCPY_OPS = frozenset({"MemcpyFromHost", "MemcpyToHost"})
LAYOUT = frozenset({"ReorderInput", "ReorderOutput", "Transpose", "Cast", "QuantizeLinear", "DequantizeLinear"})
"""Operators that ONNX Runtime adds between other nodes."""
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"})
"""Operators of ONNX and com.microsoft with subgraphs that ONNX Runtime runs node by node."""
FOLDED = frozenset({"Constant", "Shape", "Size"})
"""Operators that ONNX Runtime computes before a run; no executed node replaces them."""
Node = TypeVar("Node", bound=Hashable)


class Memcpy(NamedTuple):
    """The tensor that a Memcpy node copies."""

    op_type: str
    tensor: str


class Graph:
    """Nodes of a graph by name, in topological order, with their edges."""

    def __init__(self, nodes: Iterable[GraphNode]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.makers: dict[str, str] = {}
        """Tensor -> node that produces it; graph inputs and constants have none."""
        self.readers: dict[str, list[str]] = {}
        """Tensor -> nodes that read it."""
        for name, node in self.nodes.items():
            self.makers |= dict.fromkeys(filter(None, node.outputs), name)
            for tensor in dict.fromkeys(filter(None, node.inputs)):
                self.readers.setdefault(tensor, []).append(name)

    def before(self, names: Iterable[str]) -> set[str]:
        """The producers of the inputs of nodes."""
        return {self.makers[tensor] for name in names for tensor in self.nodes[name].inputs if tensor in self.makers}

    def after(self, names: Iterable[str]) -> set[str]:
        """The readers of the outputs of nodes."""
        return {each for name in names for tensor in self.nodes[name].outputs for each in self.readers.get(tensor, ())}


class OptimisedGraph(Graph):
    """The optimised graph of a session. `file`: nodes of the ONNX file."""

    def __init__(self, nodes: Iterable[GraphNode], file: Iterable[GraphNode]) -> None:
        nodes, exported = list(nodes), list(file)
        super().__init__(nodes)
        self.unnamed_node_outputs = {tensor for node in nodes if not node.name for tensor in node.outputs}
        """Output tensors of nodes without a name."""
        known = {tensor for node in exported for tensor in (*node.inputs, *node.outputs)}
        # The outputs of a Split that replaces Slices have the names of the Slices.
        split = {tensor for tensor, maker in self.makers.items() if maker != tensor and tensor not in known}
        self.other_names = {node.name: node.outputs[0] for node in exported if node.name in split}
        """Name of a tensor in the optimised graph -> its other name, that of the ONNX file if it has the tensor."""
        for node in self.nodes.values():
            sides = [tensor for tensor in (*node.inputs, *node.outputs) if tensor]
            if node.op_type in MEMCPY_OPS and sides:
                chosen = next((tensor for tensor in sides if tensor in known), min(sides, key=len))
                chosen = self.original(chosen)
                self.other_names |= {tensor: chosen for tensor in sides if tensor != chosen}

    def original(self, tensor: str) -> str:
        """The name of a tensor in the ONNX file; unchanged if the file has no such tensor."""
        return self.other_names.get(tensor, tensor)

    def copies(self) -> dict[str, Memcpy]:
        """The copy of each Memcpy node, with the file's name of its tensor."""
        nodes = (node for node in self.nodes.values() if node.op_type in MEMCPY_OPS and node.inputs)
        return {node.name: Memcpy(node.op_type, self.original(node.inputs[0])) for node in nodes}

    def with_file_tensors(self, names: Collection[str]) -> Graph:
        """The graph of the nodes of these names, without copies and with the names of tensors in the ONNX file."""
        nodes = (node for name, node in self.nodes.items() if name in names and node.op_type not in MEMCPY_OPS)
        original = self.original
        return Graph(
            replace(node, inputs=tuple(map(original, node.inputs)), outputs=tuple(map(original, node.outputs)))
            for node in nodes
        )


class Region(NamedTuple):
    """Names of the nodes between the cuts, in order."""

    file: list[str]
    executed: list[str]


class Cut:
    """Both graphs, and the tensors that both produce.

    Args:
        executed: The executed graph, with the file's names of tensors and without copies.
        inputs: Names of the graph's inputs.
    """

    def __init__(self, file: Graph, executed: Graph, inputs: Iterable[str]) -> None:
        self.file, self.executed = file, executed
        self.shared = file.makers.keys() & executed.makers.keys()
        self.sources = {each for each in self.shared if file.nodes[file.makers[each]].op_type not in FOLDED}
        self.sources.update(inputs)
        kept = executed.nodes.keys() & file.nodes.keys()
        kept = {name for name in kept if _operator(executed.nodes[name]) == _operator(file.nodes[name])}
        self.added = executed.nodes.keys() - kept
        """Executed nodes that the file does not have, or has with another operator."""
        moved = {name for name in kept if executed.nodes[name].outputs != file.nodes[name].outputs}
        self.changed = self.added | moved
        """Executed nodes that the file does not have, or has with another operator or other outputs."""

    def regions(self) -> Iterator[Region]:
        """The regions with nodes of both graphs in which ONNX Runtime changed nodes.

        They are connected by tensors of only one graph, or by tensors that both graphs produce. A region is omitted if
        its executed nodes do not read all inputs of its file nodes.
        """
        tensors: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for side, graph in (("file", self._computed()), ("executed", self.executed)):
            own = graph.makers.keys() - self.shared
            for name, node in graph.nodes.items():
                tensors[side, name] = [(side, each) for each in (*node.inputs, *node.outputs) if each in own]
                tensors[side, name] += [("both", each) for each in node.outputs if each in self.shared]
        for group in connected(tensors):
            file = [name for side, name in group if side == "file"]
            executed = [name for side, name in group if side == "executed"]
            needed = {tensor for name in file for tensor in self.file.nodes[name].inputs if tensor in self.sources}
            there = {tensor for name in file for tensor in self.file.nodes[name].outputs}
            there |= {tensor for name in executed for tensor in self.executed.nodes[name].inputs}
            if file and not self.changed.isdisjoint(executed) and needed <= there:
                yield Region(file, executed)

    def _computed(self) -> Graph:
        """File nodes that depend on shared tensors or on inputs of a changed node, without constants."""
        known = self.sources.union(*(self.executed.nodes[name].inputs for name in self.changed)) - {""}
        found: dict[str, GraphNode] = {}
        for name, node in self.file.nodes.items():
            reads = (each in known or self.file.makers.get(each) in found for each in node.inputs)
            if node.op_type not in FOLDED and any(reads):
                found[name] = node
        return Graph(found.values())

    def fits(self, region: Region, owners: Mapping[str, str]) -> bool:
        """Whether the executed nodes have the same dependencies and outputs as the file nodes joined with them.

        `owners`: file node -> executed node. Nodes without an owner are passed through.
        """
        works = {name: name for name in owners.values()}
        return self._flow(region.executed, self.executed, works) == self._flow(region.file, self.file, owners)

    def _flow(self, names: Iterable[str], graph: Graph, owners: Mapping[str, str]) -> dict[str, set[str]]:
        """The owners whose outputs each owner reads, and the owner that produces each shared tensor."""
        found: dict[str, set[str]] = {}
        made: dict[str, set[str]] = {}
        for name in names:
            before = {owner for tensor in graph.nodes[name].inputs for owner in made.get(tensor, ())}
            if name in owners:
                found.setdefault(owners[name], set()).update(before - {owners[name]})
                before = {owners[name]}
            made |= dict.fromkeys(filter(None, graph.nodes[name].outputs), before)
        return found | {f"tensor {tensor}": before for tensor, before in made.items() if tensor in self.shared}


def _operator(node: GraphNode) -> tuple[str, str]:
    """The operator of a node with its domain."""
    return node.domain, node.op_type


def connected(nodes: Mapping[Node, Iterable[Hashable]]) -> list[list[Node]]:
    """Groups of nodes that have tensors in common, directly or through other nodes, in the order of `nodes`."""
    parent: dict[Hashable, Hashable] = {}

    def root(key: Hashable) -> Hashable:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for node, tensors in nodes.items():
        for tensor in tensors:
            parent[root(("tensor", tensor))] = root(("node", node))
    return list(grouped(nodes, lambda node: root(("node", node))).values())


COMPILED = "CompiledSubgraph"
"""Operator name for all compiled subgraphs. ONNX Runtime gives each an operator with a running number."""
NUMBER = re.compile(r"_(\d+)$")


def compiled_subgraphs(
    assigned: Iterable[AssignedNode], order: Collection[str], exported: Collection[str]
) -> dict[str, tuple[AssignedNode, ...]]:
    """The listed nodes in each compiled node of the plan, by its name.

    A compiled node is called `<provider>_<name>_<number>`, numbered in the order of the assignment list. Omits a
    provider with different numbers of nodes and entries, e.g. with subgraphs inside control flow.
    """
    entries = grouped((node for node in assigned if node.provider != CPU), lambda node: node.provider)
    found: dict[str, tuple[AssignedNode, ...]] = {}
    for provider, listed in entries.items():
        subgraphs = grouped(listed, lambda node: node.subgraph)
        numbered = [
            (int(number[1]), name)
            for name in order
            if name not in exported and name.startswith(f"{provider}_") and (number := NUMBER.search(name))
        ]
        gone = [nodes for _, nodes in sorted(subgraphs.items()) if not all(node.name in order for node in nodes)]
        if len(gone) == len(numbered):
            found |= {name: tuple(nodes) for (_, name), nodes in zip(sorted(numbered), gone, strict=True)}
    return found


def file_nodes(
    compiled: Mapping[str, tuple[AssignedNode, ...]], exported: Graph, order: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """The file nodes in each compiled node that are not executed themselves. `compiled`: from `compiled_subgraphs`.

    A listed node may be the result of an earlier fusion, whose name begins with the name of a file node, or of a change
    of layout, which appends a number to the name. Other nodes that are not executed belong to the compiled node if all
    their producers and consumers do; a DequantizeLinear if its consumers do, a QuantizeLinear if its producer does.
    """
    listed: dict[str, list[str]] = {}
    for name, nodes in compiled.items():
        listed[name] = list(dict.fromkeys(each for node in nodes for each in _file_nodes_of(node, exported)))
    home = {each: name for name, names in listed.items() for each in names}
    computed = Graph(node for node in exported.nodes.values() if node.op_type not in FOLDED)
    gone = {
        name: (*filter(None, node.inputs), *filter(None, node.outputs))
        for name, node in computed.nodes.items()
        if home and name not in home and name not in order
    }
    for group in connected(gone):
        before, after = computed.before(group).difference(group), exported.after(group).difference(group)
        operators = {exported.nodes[name].op_type for name in group}
        if operators == {"DequantizeLinear"}:
            around = after
        elif operators == {"QuantizeLinear"}:
            around = before
        else:
            around = before | after if before and after else set()
        homes = {home.get(name) for name in around}
        if len(homes) == 1 and (owner := homes.pop()) is not None:
            listed[owner] += group
    found = {name: tuple(each for each in names if each not in order) for name, names in listed.items()}
    return {name: names for name, names in found.items() if names}


def _file_nodes_of(node: AssignedNode, exported: Graph) -> tuple[str, ...]:
    """The file nodes of a listed node: that of its name, of its name before a change of layout, or of its fusion."""
    plain = RENAMED.sub("", node.name)
    if node.name in exported.nodes:
        return (node.name,)
    if plain in exported.nodes and exported.nodes[plain].op_type == node.op_type:
        return (plain,)
    return naming.replaced_by(node.name, exported.nodes)
