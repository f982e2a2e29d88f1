"""Nodes in the graph attribute of SequenceMap, the only ONNX function with a graph attribute. Pure.

ONNX Runtime lists these nodes twice: under their names in the file before it inlines the function, and then in the
resulting loop with the function's name as a prefix (`_inlfunc_SequenceMap_inner`). Both entries are one node: it has
the name of the file and the provider of the later entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from partita.observations.facts import GraphNode, SessionFacts
from partita.observations.names import INLINED

TAKES_A_GRAPH = frozenset({"SequenceMap"})
COPIED = re.compile(rf"{INLINED}({'|'.join(sorted(TAKES_A_GRAPH))})_(token_\d+_)?(?P<name>.+)", re.DOTALL)
OF_ONNX = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class Copies:
    """Executed names of the nodes of these graphs."""

    names: Mapping[str, str]
    """Executed name -> name in the file."""
    owners: Mapping[str, tuple[str, ...]]
    """Name in the file -> the function nodes of the main graph whose graph attribute may contain the node."""

    @property
    def copied_as(self) -> dict[str, tuple[str, ...]]:
        """Name in the file -> executed names."""
        found: dict[str, tuple[str, ...]] = {}
        for copy, name in self.names.items():
            found[name] = (*found.get(name, ()), copy)
        return found


def has_graph_attribute(node: GraphNode) -> bool:
    """Whether a file node is a function with a graph attribute."""
    return node.op_type in TAKES_A_GRAPH and node.domain in OF_ONNX


def with_file_names(facts: SessionFacts) -> tuple[SessionFacts, Copies]:
    """The facts with one entry for each node of these graphs, under its name in the file."""
    holders = [node for node in facts.graph if has_graph_attribute(node)]
    if not holders and not any(map(has_graph_attribute, facts.subgraph_nodes)):
        return facts, Copies({}, {})
    inner = {node.name for node in facts.subgraph_nodes}
    known = {node.name for node in facts.graph} | inner
    seen = [node.name for node in facts.assigned or ()] + [event.name for event in facts.events]
    seen += [node.name for holder in facts.optimised or () for node in holder.subgraph_nodes]
    names = {
        name: match["name"]
        for name in dict.fromkeys(seen)
        if name not in known and (match := COPIED.fullmatch(name)) and match["name"] in inner
    }
    listed = facts.assigned
    if listed is not None:
        copied = {names[node.name] for node in listed if node.name in names}
        listed = tuple(
            replace(node, name=names.get(node.name, node.name)) for node in listed if node.name not in copied
        )
    events = tuple(replace(event, name=names.get(event.name, event.name)) for event in facts.events)
    owners = dict.fromkeys(names.values(), tuple(node.name for node in holders))
    return replace(facts, assigned=listed, events=events), Copies(names, owners)


def log_lines(log: Mapping[str, Sequence[str]], copies: Copies) -> dict[str, tuple[str, ...]]:
    """Log lines by node; lines with an executed name belong to the node's name in the file."""
    found = {name: tuple(lines) for name, lines in log.items() if name not in copies.names}
    for copy, name in copies.names.items():
        found[name] = tuple(dict.fromkeys((*log.get(copy, ()), *found.get(name, ()))))
    return found
