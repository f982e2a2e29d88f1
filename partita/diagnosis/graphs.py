"""The tensors of the file's graph and of the executed graph, and both graphs cut at the tensors that they share. Pure.

In the optimised graph a copied tensor has two names, one per memory: `hidden` and `hidden_WebGpuExecutionProvider`.
Fusion and changes of layout preserve the names of tensors, but not the names of nodes. The nodes between the cuts are a
region: its executed nodes compute the same tensors as its file nodes. A compiled subgraph is one executed node and one
entry of the assignment list, which names the nodes in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from partita.diagnosis import naming
from partita.observations.facts import AssignedNode, GraphNode
from partita.observations.names import CPU, RENAMED

MEMCPY_OPS = frozenset({"MemcpyFromHost", "MemcpyToHost"})
LAYOUT = frozenset({"ReorderInput", "ReorderOutput", "Transpose", "Cast", "QuantizeLinear", "DequantizeLinear"})
"""Operators that ONNX Runtime adds between other nodes."""
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"})
"""Operators of ONNX and com.microsoft with subgraphs that ONNX Runtime runs node by node."""
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


Nodes = Mapping[str, GraphNode]
Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Region:
    """Names of the nodes between the cuts, in order."""

    file: list[str]
    executed: list[str]
    changed: list[str]
    """Executed nodes that the file does not have, or has with another operator or other outputs."""
    added: list[str]
    """Executed nodes that the file does not have, or has with another operator."""


class Cut:
    """The nodes of both graphs in topological order, and the tensors that both graphs produce.

    Args:
        file: Nodes of the file.
        executed: Nodes of the executed graph, with the file's names of tensors and without copies.
        inputs: Names of the graph's inputs.
    """

    def __init__(self, file: Nodes, executed: Nodes, inputs: Iterable[str]) -> None:
        self.file, self.executed = file, executed
        makers, _ = edges(file)
        self.shared = makers.keys() & edges(executed)[0].keys()
        self.sources = {each for each in self.shared if file[makers[each]].op_type not in FOLDED}.union(inputs)

    def regions(self) -> Iterator[Region]:
        """The regions with nodes of both graphs in which ONNX Runtime changed nodes.

        A region is omitted if its executed nodes do not read all inputs of its file nodes.
        """
        for file, executed in self._connected():
            added = [name for name in executed if is_other(self.executed[name], self.file.get(name))]
            moved = [name for name in executed if name in self.file and self._outputs_differ(name)]
            needed = {tensor for name in file for tensor in self.file[name].inputs if tensor in self.sources}
            there = {tensor for name in file for tensor in self.file[name].outputs}
            there |= {tensor for name in executed for tensor in self.executed[name].inputs}
            if file and (added or moved) and needed <= there:
                yield Region(file, executed, [name for name in executed if name in (*added, *moved)], added)

    def _outputs_differ(self, name: str) -> bool:
        return self.executed[name].outputs != self.file[name].outputs

    def _computed(self) -> dict[str, GraphNode]:
        """File nodes that depend on shared tensors or on inputs of a changed node, without constants."""
        makers, _ = edges(self.file)
        known = {*self.sources}
        for name, node in self.executed.items():
            if is_other(node, self.file.get(name)) or self._outputs_differ(name):
                known.update(filter(None, node.inputs))
        found: dict[str, GraphNode] = {}
        for name, node in self.file.items():
            reads = (each in known or makers.get(each) in found for each in node.inputs)
            if node.op_type not in FOLDED and any(reads):
                found[name] = node
        return found

    def _connected(self) -> Iterator[tuple[list[str], list[str]]]:
        """Groups of nodes connected by tensors of only one graph, or by tensors that both graphs produce."""
        tensors: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for side, nodes in (("file", self._computed()), ("executed", self.executed)):
            own = edges(nodes)[0].keys() - self.shared
            for name, node in nodes.items():
                tensors[side, name] = [(side, each) for each in (*node.inputs, *node.outputs) if each in own]
                tensors[side, name] += [("both", each) for each in node.outputs if each in self.shared]
        for group in connected(tensors):
            yield [name for side, name in group if side == "file"], [name for side, name in group if side == "executed"]

    def fits(self, region: Region, owners: Mapping[str, str]) -> bool:
        """Whether the executed nodes have the same dependencies and outputs as the file nodes joined with them.

        `owners`: file node -> executed node. Nodes without an owner are passed through.
        """
        works = {name: name for name in owners.values()}
        return self._flow(region.executed, self.executed, works) == self._flow(region.file, self.file, owners)

    def _flow(self, names: Iterable[str], nodes: Nodes, owners: Mapping[str, str]) -> dict[str, set[str]]:
        """The owners whose outputs each owner reads, and the owner that produces each shared tensor."""
        found: dict[str, set[str]] = {}
        made: dict[str, set[str]] = {}
        for name in names:
            before = {owner for tensor in nodes[name].inputs for owner in made.get(tensor, ())}
            if name in owners:
                found.setdefault(owners[name], set()).update(before - {owners[name]})
                before = {owners[name]}
            made |= dict.fromkeys(filter(None, nodes[name].outputs), before)
        return found | {f"tensor {tensor}": before for tensor, before in made.items() if tensor in self.shared}


def is_other(node: GraphNode, before: GraphNode | None) -> bool:
    """Whether the file has no such node, or has it with another operator."""
    return before is None or (before.op_type, before.domain) != (node.op_type, node.domain)


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
    groups: dict[Hashable, list[Node]] = {}
    for node in nodes:
        groups.setdefault(root(("node", node)), []).append(node)
    return list(groups.values())


COMPILED = "CompiledSubgraph"
"""Operator name for all compiled subgraphs. ONNX Runtime gives each an operator with a running number."""
NUMBER = re.compile(r"_(\d+)$")
Listed = Mapping[str, tuple[AssignedNode, ...]]
"""Compiled node -> its nodes in the assignment list."""


def compiled_subgraphs(
    assigned: Iterable[AssignedNode], order: Collection[str], exported: Collection[str]
) -> dict[str, tuple[AssignedNode, ...]]:
    """The listed nodes in each compiled node of the plan, by its name.

    A compiled node is called `<provider>_<name>_<number>`, numbered in the order of the assignment list. Omits a
    provider with different numbers of nodes and entries, e.g. with subgraphs inside control flow.
    """
    entries: dict[str, dict[int, list[AssignedNode]]] = {}
    for node in assigned:
        if node.provider != CPU:
            entries.setdefault(node.provider, {}).setdefault(node.subgraph, []).append(node)
    found: dict[str, tuple[AssignedNode, ...]] = {}
    for provider, subgraphs in entries.items():
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
    compiled: Listed, exported: Mapping[str, GraphNode], order: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """The file nodes in each compiled node that are not executed themselves.

    A listed node may be the result of an earlier fusion, whose name begins with the name of a file node, or of a change
    of layout, which appends a number to the name. Other nodes that are not executed belong to the compiled node if all
    their producers and consumers do; a DequantizeLinear if its consumers do, a QuantizeLinear if its producer does.
    """
    listed: dict[str, list[str]] = {}
    for name, nodes in compiled.items():
        listed[name] = list(dict.fromkeys(each for node in nodes for each in _file_nodes_of(node, exported)))
    home = {each: name for name, names in listed.items() for each in names}
    gone = {
        name: (*filter(None, node.inputs), *filter(None, node.outputs))
        for name, node in exported.items()
        if home and name not in home and name not in order and node.op_type not in FOLDED
    }
    makers, readers = edges(exported)
    for group in connected(gone):
        before = {makers[tensor] for name in group for tensor in exported[name].inputs if tensor in makers}
        before = {name for name in before.difference(group) if exported[name].op_type not in FOLDED}
        after = {each for name in group for tensor in exported[name].outputs for each in readers.get(tensor, ())}
        after -= {*group}
        operators = {exported[name].op_type for name in group}
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


def _file_nodes_of(node: AssignedNode, exported: Mapping[str, GraphNode]) -> tuple[str, ...]:
    """The file nodes of a listed node: that of its name, of its name before a change of layout, or of its fusion."""
    plain = RENAMED.sub("", node.name)
    if node.name in exported:
        return (node.name,)
    if plain in exported and exported[plain].op_type == node.op_type:
        return (plain,)
    return naming.replaced_by(node.name, exported)
