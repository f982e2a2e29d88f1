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
from partita.observations.facts import AssignedNode, GraphNode, SessionFacts


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
    certain, compiled = set[int](), set[int]()
    for place, node in enumerate(listed):
        if node in main.compiled:
            compiled.add(place)
        elif node.name and node.name in named.subgraph_names:
            certain.add(place)
        else:  # nodes without a name are distinguished by operator
            groups.setdefault(_key(node.name, node.op_type), []).append(place)
    file = _File.of(facts, main, named)
    if facts.optimised is None:
        shares = _by_name(listed, main, file, groups)
    else:
        shares = _by_graph(facts, main, named, file, groups)
    ours = compiled.union(*(share[0] for share in shares))
    theirs = certain.union(*(share[1] for share in shares))
    return NodeList(
        main_graph=tuple(node for place, node in enumerate(listed) if place in ours),
        in_subgraphs=tuple(node for place, node in enumerate(listed) if place in theirs),
    )


Key = tuple[str, str]
"""The name and an empty operator, or for unnamed nodes an empty name and the operator."""
Share = tuple[Collection[int], Collection[int]]
"""Positions in the list of entries of one name: in the main graph, and in subgraphs."""


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


def _by_name(
    listed: Sequence[AssignedNode], main: MainGraph, file: _File, groups: Mapping[Key, Sequence[int]]
) -> list[Share]:
    """The shares without an optimised graph, from the numbers of nodes of a name in the file and in the plan."""
    shares: list[Share] = []
    for (name, _), places in groups.items():
        chosen, similar = _main_share(listed, places, main.counts.get(name, 0), main)
        rest = [place for place in places if place not in chosen]
        if file.made_of_main(name):
            inside = 0
        elif file.graph[name] and file.subgraph_nodes[name]:
            inside = min(len(rest), file.subgraph_nodes[name])
        else:
            inside = max(len(places) - max(len(chosen), file.graph[name]), 0)
        shares.append(({*similar, *rest[inside:]}, rest[:inside]))
    return shares


@dataclass(frozen=True, slots=True)
class NameMatches:
    """Entries of one name in the optimised graph (main graph, subgraphs), and entries that are not in it."""

    matched: Collection[int]
    in_subgraphs: Collection[int]
    removed: Sequence[int]


def _by_graph(
    facts: SessionFacts, main: MainGraph, named: KnownNames, file: _File, groups: Mapping[Key, Sequence[int]]
) -> list[Share]:
    """The shares from the subgraphs of the optimised graph."""
    listed, optimised = facts.assigned or (), facts.optimised or ()
    in_subgraphs = _in_subgraphs(listed, optimised, named)
    there = Counter(_key(node.name, node.op_type) for node in optimised)
    made = any(key not in groups for key in in_subgraphs)
    """Whether a subgraph has a node that was added after the list."""
    found: dict[Key, NameMatches] = {}
    for key, places in groups.items():
        within = in_subgraphs.get(key, [])
        count = max(there[key], main.counts.get(key[0], 0))
        chosen, similar = _main_share(listed, places, count, main)
        rest = [place for place in places if place not in chosen]
        inside = set(rest[: len(within)])
        made = made or bool(Counter(within) - Counter(listed[place].op_type for place in inside))
        gone = [place for place in rest if place not in inside]
        if len(inside) < len(within):  # one of the graphs has an unlisted node; which one is unknown
            alike = [place for place in chosen if listed[place].op_type in within]
            inside |= set(alike[: len(within) - len(inside)])
        found[key] = NameMatches(similar, inside, gone)
    shares: list[Share] = []
    for (name, _), each in found.items():
        most = len(each.removed)
        if file.subgraph_nodes[name]:
            most = min(most, max(file.subgraph_nodes[name] - len(each.in_subgraphs), 0)) if file.graph[name] else most
        elif file.graph[name] or not made or file.made_of_main(name):
            most = 0
        shares.append(({*each.matched, *each.removed[most:]}, {*each.in_subgraphs, *each.removed[:most]}))
    return shares


def _in_subgraphs(
    listed: Sequence[AssignedNode], optimised: Sequence[GraphNode], named: KnownNames
) -> dict[Key, list[str]]:
    """Key in the list -> operators of nodes in subgraphs of the optimised graph that may be listed."""
    in_subgraphs: dict[Key, list[str]] = {}
    for node in (each for holder in optimised for each in holder.subgraph_nodes if each.op_type not in MEMCPY_OPS):
        in_subgraphs.setdefault(_key(named.copies.get(node.name, node.name), node.op_type), []).append(node.op_type)
    for op in (node.op_type for node in listed if node.name and node.name in named.subgraph_names):
        if in_subgraphs.get(_key("", op)):
            in_subgraphs[_key("", op)].pop()
    return {key: operators for key, operators in in_subgraphs.items() if operators}


def _key(name: str, op_type: str) -> Key:
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
