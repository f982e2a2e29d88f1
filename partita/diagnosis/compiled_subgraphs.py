"""File nodes inside each compiled subgraph. Pure.

A compiled subgraph is one executed node and one entry of the assignment list, which names the nodes in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from partita.diagnosis import naming
from partita.diagnosis.graphs import FOLDED, connected, edges
from partita.observations.facts import AssignedNode, GraphNode
from partita.observations.names import CPU

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

    A listed node may be the result of an earlier fusion: its name begins with the name of a file node. Fused nodes that
    are not listed belong to the compiled node if all their producers and consumers do.
    """
    listed: dict[str, list[str]] = {}
    for name, nodes in compiled.items():
        names = (
            naming.replaced_by(each.name, exported) if each.name not in exported else [each.name] for each in nodes
        )
        listed[name] = list(dict.fromkeys(each for found in names for each in found))
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
        homes = {home.get(name) for name in before | after.difference(group)}
        if before and after.difference(group) and len(homes) == 1 and (owner := homes.pop()) is not None:
            listed[owner] += group
    found = {name: tuple(each for each in names if each not in order) for name, names in listed.items()}
    return {name: names for name, names in found.items() if names}
