"""Assigns the entries of the assignment list to the main graph or its control-flow subgraphs. Pure.

The list does not name the graph, and a node name is unique only within a graph: a name that ONNX Runtime derives from
an operator, a function or a fusion (`_if_then_branch_Clip`, `_inlfunc_F_clip`, `gemm_input_reshape`) may be in the main
graph and in every subgraph. So the entries of a name are counted: as many as the main graph has belong to it, and the
others to subgraphs. The optimised graph includes the subgraphs; an entry that is not in it was fused or removed later.
An entry without evidence counts as in a subgraph, so that a check never passes wrongly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from partita.diagnosis import naming
from partita.diagnosis.graphs import MEMCPY_OPS
from partita.observations.facts import AssignedNode, SessionFacts


@dataclass(frozen=True, slots=True)
class NodeList:
    """The list in two parts; an entry without evidence is in both."""

    main_graph: tuple[AssignedNode, ...]
    """Entries of the main graph, before or after later optimisations."""
    in_subgraphs: tuple[AssignedNode, ...]
    """Entries that are or may be in control-flow subgraphs."""


@dataclass(frozen=True, slots=True)
class MainGraph:
    """The executed main graph, by node name."""

    counts: Mapping[str, int]
    op_types: Mapping[str, str | None]
    providers: Mapping[str, str]
    """Provider of a node by other sources than the list: the profile, or the devices of the plan."""
    compiled: Collection[AssignedNode]
    """Entries in its compiled subgraphs."""
    has_subgraphs: bool
    """Whether a node of it may be control flow."""
    control_flow: Collection[str]
    """Operators that have subgraphs."""


@dataclass(frozen=True, slots=True)
class KnownNames:
    """Names of nodes that are certainly in control-flow subgraphs."""

    subgraph_names: Collection[str]
    """New names of unnamed entries in subgraphs."""
    ran: Collection[str]
    """Names of nodes that ran only in subgraphs."""
    copies: Mapping[str, str]
    """Executed name of a subgraph's node -> its name in the list."""


def split_list(facts: SessionFacts, main: MainGraph, named: KnownNames) -> NodeList:
    """The assignment list, in two parts."""
    listed = facts.assigned or ()
    if not (main.has_subgraphs if facts.optimised is None else any(node.subgraph_nodes for node in facts.optimised)):
        return NodeList(listed, ())
    groups: dict[Key, list[int]] = {}
    ours, theirs = set[int](), set[int]()
    for place, node in enumerate(listed):
        if node in main.compiled:
            ours.add(place)
        elif node.name and node.name in named.subgraph_names:
            theirs.add(place)
        else:
            groups.setdefault(_key(node.name, node.op_type), []).append(place)
    file = _File.of(facts, main, named)
    inner = Counter(
        _key(named.copies.get(node.name, node.name), node.op_type)
        for holder in facts.optimised or ()
        for node in holder.subgraph_nodes
        if node.op_type not in MEMCPY_OPS
    )
    is_final = facts.optimised is not None and groups.keys() >= inner.keys()  # the list has every node of a subgraph
    for key, places in groups.items():
        name, _ = key
        chosen, similar = _main_share(listed, places, main.counts.get(name, 0), main)
        rest = [place for place in places if place not in chosen]
        if file.made_of_main(name) or (is_final and not inner[key] and not file.subgraph_nodes[name]):
            inside = 0
        elif file.graph[name] and file.subgraph_nodes[name]:
            inside = min(len(rest), file.subgraph_nodes[name])
        else:
            inside = max(len(places) - max(len(chosen), file.graph[name]), 0)
        ours |= {*similar, *rest[inside:]}
        theirs.update(rest[:inside])
    return NodeList(
        main_graph=tuple(node for place, node in enumerate(listed) if place in ours),
        in_subgraphs=tuple(node for place, node in enumerate(listed) if place in theirs),
    )


Key = tuple[str, str]
"""The name and an empty operator, or for unnamed nodes an empty name and the operator."""


@dataclass(frozen=True, slots=True)
class _File:
    """Names of the file's nodes, with their numbers."""

    graph: Counter[str]
    """In the main graph, without the nodes in compiled subgraphs."""
    subgraph_nodes: Counter[str]
    """In control-flow subgraphs."""
    subgraph_names: Collection[str]
    """Names of control-flow nodes and of the nodes in them."""
    ran: Collection[str]
    names: Collection[str]
    """All node names of the file."""

    @classmethod
    def of(cls, facts: SessionFacts, main: MainGraph, named: KnownNames) -> _File:
        graph, inner = (
            Counter(node.name for node in nodes if node.name) for nodes in (facts.graph, facts.subgraph_nodes)
        )
        holders = (node.name for node in facts.graph if node.op_type in main.control_flow)
        compiled = Counter(node.name for node in main.compiled)
        return cls(graph - compiled, inner, {*inner, *holders}, named.ran, {*graph, *inner})

    def made_of_main(self, name: str) -> bool:
        """Whether the name of a new node begins with the name of a node that only the main graph has.

        E.g. MatMul, Add and Relu before an If: the list has `NAME/MatMulAddFusion`, the plan a node that fuses it.
        """
        if name in self.subgraph_nodes or name in self.ran:
            return False
        known = naming.replaced_by(name, self.names)
        return bool(known) and known[-1] not in self.subgraph_names


def _key(name: str, op_type: str) -> Key:
    """Nodes without a name are distinguished by operator."""
    return (name, "") if name else ("", op_type)


def _main_share(
    listed: Sequence[AssignedNode], places: Sequence[int], count: int, main: MainGraph
) -> tuple[set[int], set[int]]:
    """The most similar entries of a name, as many as the main graph has; and these with equally similar entries.

    ONNX Runtime partitions the subgraphs before the graph, one provider after the other, so the last entry on a
    provider is in the main graph.
    """
    if not count or not places:
        return set(), set()
    name = listed[places[0]].name
    op, provider = main.op_types.get(name), main.providers.get(name)

    def likeness(place: int) -> tuple[bool, bool]:
        return listed[place].op_type == op, listed[place].provider == provider

    homes = sorted({listed[place].provider for place in places}, reverse=True)
    ranked = sorted(places, key=lambda place: (*likeness(place), homes.index(listed[place].provider), place))
    chosen = set(ranked[-count:])
    least = min(map(likeness, chosen))
    doubtful = least[1] is False and provider is None
    return chosen, chosen | {place for place in places if doubtful and likeness(place) == least}
