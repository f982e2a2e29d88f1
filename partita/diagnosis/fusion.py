"""Which exported nodes a node of the plan stands for: a compiled subgraph, or a node that ONNX Runtime fused. Pure.

A compiled subgraph is one node of the plan and one entry of the assignment list, which names its nodes. What a fused
node replaced is found in the graphs: the exported nodes on the way from its outputs back to its inputs. Where a graph
is missing or the way is not clear, its name may tell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from partita.diagnosis import naming
from partita.diagnosis.optimised_graph import MEMCPY_OPS, OptimisedGraph
from partita.observations.facts import AssignedNode, GraphNode
from partita.observations.names import CPU

COMPILED = "CompiledSubgraph"
"""Operator under which a compiled subgraph is counted; ONNX Runtime makes up one for each, with a running number."""
NUMBER = re.compile(r"_(\d+)$")
FOLDED = frozenset({"Constant", "Shape", "Size"})
"""Operators that ONNX Runtime works out beforehand: one that is gone was folded, and no other node stands for it."""


def compiled_subgraphs(
    assigned: Iterable[AssignedNode], order: Collection[str], exported: Collection[str]
) -> dict[str, tuple[AssignedNode, ...]]:
    """The listed nodes behind each compiled node of the plan, by its name.

    A compiled node is called `<provider>_<name>_<number>`, numbered in the order in which the assignment list has its
    entries. Empty for a provider whose nodes and entries differ in number, as with subgraphs inside control flow.
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


def stand_ins(
    order: Collection[str],
    exported: Mapping[str, GraphNode],
    compiled: Mapping[str, tuple[AssignedNode, ...]],
    graph: OptimisedGraph | None,
    inputs: Collection[str],
) -> dict[str, tuple[str, ...]]:
    """Exported nodes that each node of `order` took the place of, as the graphs and the list of what is in a compiled
    subgraph have it; nodes that took none have no entry.

    `inputs` are the graph's. An exported node that still runs under its own name is never among them.
    """
    walked = _walk_all(order, exported, graph, inputs) if graph is not None else {}
    listed = {name: _in_file((node.name for node in nodes), exported) for name, nodes in compiled.items()}
    inner = _between(order, exported, listed)
    found = {name: (*listed[name], *inner[name]) if name in compiled else walked.get(name, ()) for name in order}
    return _left(found, order)


def by_name(
    order: Collection[str],
    exported: Mapping[str, GraphNode],
    graph: OptimisedGraph | None,
    known: Collection[str],
    taken: Collection[str],
) -> dict[str, tuple[str, ...]]:
    """The same as names tell, of nodes that the file does not have and that are not `known`; none is `taken`.

    A name has one node of several that were fused, so this goes last: it says nothing of the others.
    """
    new = (name for name in order if name not in known and name not in exported)
    named = {name: tuple(each for each in _named_after(name, exported, graph) if each not in taken) for name in new}
    return _left(named, order)


def _left(found: Mapping[str, Sequence[str]], order: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Without exported nodes that still run, and nodes that stand for no other."""
    left = {name: tuple(each for each in behind if each not in order) for name, behind in found.items()}
    return {name: behind for name, behind in left.items() if behind}


def _named_after(name: str, exported: Collection[str], graph: OptimisedGraph | None) -> tuple[str, ...]:
    """Exported nodes that a node is called after, or one of its outputs, as those of a Split made of Slices are."""
    node = graph.nodes.get(name) if graph is not None else None
    outputs = (tensor for tensor in (node.outputs if node else ()) if tensor in exported)
    return tuple(dict.fromkeys((*outputs, *naming.replaced_by(name, exported))))


def _in_file(listed: Iterable[str], exported: Collection[str]) -> tuple[str, ...]:
    """The exported nodes behind listed ones, each once: the list may have nodes that ONNX Runtime fused before."""
    names = (each for name in listed for each in ([name] if name in exported else naming.replaced_by(name, exported)))
    return tuple(dict.fromkeys(names))


def _between(
    order: Collection[str], exported: Mapping[str, GraphNode], listed: Mapping[str, tuple[str, ...]]
) -> dict[str, list[str]]:
    """Exported nodes that are gone and lie inside a compiled subgraph, by its name.

    ONNX Runtime fused them with their neighbours before it made the list. A group of them is inside when every node
    that it reads from, and every node that reads from it, is.
    """
    home = {each: name for name, nodes in listed.items() for each in nodes}
    gone = {
        name: node
        for name, node in exported.items()
        if name not in home and name not in order and node.op_type not in FOLDED
    }
    makers, readers = edges(exported)
    found: dict[str, list[str]] = {name: [] for name in listed}
    for group in connected(gone) if home else ():
        before = {makers[tensor] for name in group for tensor in gone[name].inputs if tensor in makers}
        after = {each for name in group for tensor in gone[name].outputs for each in readers.get(tensor, ())}
        after -= set(group)
        computed = {name for name in before.difference(group) if exported[name].op_type not in FOLDED}
        homes = {home.get(name) for name in computed | after}
        if computed and after and len(homes) == 1 and (owner := homes.pop()) is not None:
            found[owner] += group
    return found


def edges(exported: Mapping[str, GraphNode]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Which exported node makes each tensor, and which ones read it."""
    makers: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for name, node in exported.items():
        makers |= dict.fromkeys(filter(None, node.outputs), name)
        for tensor in filter(None, node.inputs):
            readers.setdefault(tensor, []).append(name)
    return makers, readers


def connected(nodes: Mapping[str, GraphNode]) -> list[list[str]]:
    """Nodes in groups that hang together by their tensors, in the order of the file."""
    groups: list[list[str]] = []
    group_of: dict[str, list[str]] = {}
    for name, node in nodes.items():
        joined = [name]
        tensors = [tensor for tensor in (*node.inputs, *node.outputs) if tensor]
        for group in {id(group_of[tensor]): group_of[tensor] for tensor in tensors if tensor in group_of}.values():
            joined = [*group, *joined]
            groups.remove(group)
        groups.append(joined)
        for each in joined:
            group_of |= dict.fromkeys(filter(None, (*nodes[each].inputs, *nodes[each].outputs)), joined)
    return groups


def _walk_all(
    order: Collection[str], exported: Mapping[str, GraphNode], graph: OptimisedGraph, inputs: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """What each fused node replaced, by the graphs; nodes for which they do not tell are left out.

    Two nodes that lay claim to the same exported node both lose their claims.
    """
    makers, _ = edges(exported)
    position = {name: number for number, name in enumerate(exported)}  # the file has them in topological order
    claims: dict[str, tuple[str, ...]] = {}
    for name in order:
        node = graph.nodes.get(name)
        if node is not None and node.op_type not in MEMCPY_OPS and is_new(node, exported.get(name)):
            claimed = walk_back(node, graph, exported, makers, order, inputs)
            if claimed:
                claims[name] = tuple(sorted(claimed, key=position.__getitem__))
    counts = Counter(each for claimed in claims.values() for each in claimed)
    return {name: claimed for name, claimed in claims.items() if all(counts[each] == 1 for each in claimed)}


def is_new(node: GraphNode, before: GraphNode | None) -> bool:
    """True for a node that the file does not have, or has with another operator or other outputs."""
    return before is None or before.op_type != node.op_type or before.outputs != node.outputs


def walk_back(
    node: GraphNode,
    graph: OptimisedGraph,
    exported: Mapping[str, GraphNode],
    makers: Mapping[str, str],
    order: Collection[str],
    inputs: Collection[str],
) -> set[str]:
    """Exported nodes on the way from the outputs of `node` back to its inputs.

    Empty when the way leads past a node that still runs, or to a graph input that `node` does not read: then it does
    something else than the exported nodes did.
    """
    sources = {graph.original(tensor) for tensor in node.inputs if tensor}
    waiting = [makers[tensor] for tensor in map(graph.original, node.outputs) if tensor in makers]
    passed: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in passed or exported[name].op_type in FOLDED:
            continue
        if name in order and name != node.name:
            return set()
        passed.add(name)
        for tensor in exported[name].inputs:
            if tensor in sources or not tensor:
                continue
            if tensor in inputs:
                return set()
            if tensor in makers:
                waiting.append(makers[tensor])
    return _reached(passed, sources, exported, makers) - {node.name}


def _reached(
    passed: Collection[str], sources: Collection[str], exported: Mapping[str, GraphNode], makers: Mapping[str, str]
) -> set[str]:
    """Those of `passed` that work on a source, directly or through others; what is left were constants."""
    kept: set[str] = set()
    left = set(passed)
    while True:
        more = {
            name
            for name in left
            if any(tensor in sources or makers.get(tensor) in kept for tensor in exported[name].inputs)
        }
        if not more:
            return kept
        kept |= more
        left -= more
