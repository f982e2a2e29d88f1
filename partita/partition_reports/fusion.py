"""Which exported nodes a node of the plan stands for: a compiled subgraph, or a node that ONNX Runtime fused. Pure.

A compiled subgraph is one node of the plan and one entry of the assignment list, which names its nodes. What a fused
node replaced is found in the graphs: the exported nodes on the way from its outputs back to its inputs. Where a graph
is missing or the way is not clear, its name may tell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from partita.partition_reports import naming
from partita.partition_reports.facts import CPU, AssignedNode, GraphNode
from partita.partition_reports.optimised_graph import MEMCPY_OPS, OptimisedGraph

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
    """Exported nodes that each node of `order` took the place of; nodes that took none have no entry.

    `inputs` are the graph's. An exported node that still runs under its own name is never among them.
    """
    walked = walk_all(order, exported, graph, inputs) if graph is not None else {}
    found: dict[str, tuple[str, ...]] = {}
    for name in order:
        if name in compiled:
            behind = in_file((node.name for node in compiled[name]), exported)
        elif name in walked or name in exported:
            behind = walked.get(name, ())
        else:
            behind = named_after(name, exported, graph)
        left = tuple(each for each in behind if each not in order)
        if left:
            found[name] = left
    return found


def named_after(name: str, exported: Collection[str], graph: OptimisedGraph | None) -> tuple[str, ...]:
    """Exported nodes that a node is called after, or one of its outputs, as those of a Split made of Slices are."""
    node = graph.nodes.get(name) if graph is not None else None
    outputs = (tensor for tensor in (node.outputs if node else ()) if tensor in exported)
    return tuple(dict.fromkeys((*outputs, *naming.replaced_by(name, exported))))


def in_file(listed: Iterable[str], exported: Collection[str]) -> tuple[str, ...]:
    """The exported nodes behind listed ones, each once: the list may have nodes that ONNX Runtime fused before."""
    names = (each for name in listed for each in ([name] if name in exported else naming.replaced_by(name, exported)))
    return tuple(dict.fromkeys(names))


def walk_all(
    order: Collection[str], exported: Mapping[str, GraphNode], graph: OptimisedGraph, inputs: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """What each fused node replaced, by the graphs; nodes for which they do not tell are left out.

    Two nodes that lay claim to the same exported node both lose their claims.
    """
    makers = {tensor: node.name for node in exported.values() for tensor in node.outputs if tensor}
    claims: dict[str, tuple[str, ...]] = {}
    for name in order:
        node = graph.nodes.get(name)
        if node is not None and node.op_type not in MEMCPY_OPS and is_new(node, exported.get(name)):
            claimed = walk_back(node, graph, exported, makers, order, inputs)
            if claimed:
                claims[name] = claimed
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
) -> tuple[str, ...]:
    """Exported nodes on the way from the outputs of `node` back to its inputs, in the order of the file.

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
            return ()
        passed.add(name)
        for tensor in exported[name].inputs:
            if tensor in sources or not tensor:
                continue
            if tensor in inputs:
                return ()
            if tensor in makers:
                waiting.append(makers[tensor])
    return tuple(name for name in reached(passed, sources, exported) if name != node.name)


def reached(passed: Collection[str], sources: Collection[str], exported: Mapping[str, GraphNode]) -> list[str]:
    """Those of `passed` that work on a source, directly or through others; what is left were constants."""
    live, kept = set(sources), []
    for name, node in exported.items():  # the file has them in topological order
        if name in passed and not live.isdisjoint(node.inputs):
            live.update(node.outputs)
            kept.append(name)
    return kept
