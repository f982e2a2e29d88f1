"""Graphs that the file gives to a function of ONNX: SequenceMap, the only function that takes a graph. Pure.

ONNX Runtime lists their nodes twice: as the file has them, before it unfolds the function, and then in the loop that
it is unfolded into, under a name that begins with the function's (`_inlfunc_SequenceMap_inner`). They are one node,
which is called as in the file, and is where the later entry has it.
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
    """Name in the file -> the functions of the main graph that its graph may be given to."""

    @property
    def copied_as(self) -> dict[str, tuple[str, ...]]:
        """Name in the file -> executed names."""
        found: dict[str, tuple[str, ...]] = {}
        for copy, name in self.names.items():
            found[name] = (*found.get(name, ()), copy)
        return found


def has_graph_attribute(node: GraphNode) -> bool:
    """Whether a file node is a function that takes a graph."""
    return node.op_type in TAKES_A_GRAPH and node.domain in OF_ONNX


def with_file_names(facts: SessionFacts) -> tuple[SessionFacts, Copies]:
    """The facts with one entry for each node of these graphs, under its name in the file."""
    holders = [node for node in facts.graph if has_graph_attribute(node)]
    if not holders and not any(map(has_graph_attribute, facts.inner)):
        return facts, Copies({}, {})
    inner = {node.name for node in facts.inner}
    known = {node.name for node in facts.graph} | inner
    seen = [node.name for node in facts.assigned or ()] + [event.name for event in facts.events]
    seen += [node.name for holder in facts.optimised or () for node in holder.inside]
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
    """Log lines by node. Lines with an executed name are among the lines of the file's name."""
    found = {name: tuple(lines) for name, lines in log.items() if name not in copies.names}
    for copy, name in copies.names.items():
        found[name] = tuple(dict.fromkeys((*log.get(copy, ()), *found.get(name, ()))))
    return found
