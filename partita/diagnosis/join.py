"""The join of the file's graph with the executed nodes: the file nodes that each executed node replaces. Pure.

Both graphs are cut at the tensors that they share. A region with several executed nodes (`ReorderInput` -> `pool_nchwc`
-> `ReorderOutput` for one MaxPool) is divided by name, then by operator, then by data flow. A result that contradicts
the tensors of both graphs is dropped.

With a compiling provider there is no optimised graph. Then nodes are joined by name and operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from partita.diagnosis import naming
from partita.diagnosis.graphs import FOLDED, LAYOUT, MEMCPY_OPS, Cut, Nodes, OptimisedGraph, connected, edges
from partita.observations.facts import GraphNode
from partita.observations.names import INLINED

MARKS = ("_", "/")
"""Characters that ONNX Runtime appends to a name that it reuses."""
REMOVABLE = frozenset({"Identity", "Cast"})
"""Operators that ONNX Runtime removes if they have no effect: readers of the output then read the input."""
Names = Mapping[str, tuple[str, ...]]
"""Executed node -> file nodes."""
Owners = Mapping[str, str]
"""File node -> the executed node that replaces it."""


@dataclass(frozen=True, slots=True)
class ExecutedNode:
    """An executed node."""

    name: str
    op_type: str | None
    """None if neither a graph nor a profile has the node."""
    provider: str | None

    def is_related(self, file_node: GraphNode) -> bool:
        """Whether the operator is that of the file node or a variant, e.g. NhwcMaxPool of MaxPool."""
        operators = (self.op_type or "", file_node.op_type)
        return self.op_type is not None and (operators[0].endswith(operators[1]) or operators[1].endswith(operators[0]))


@dataclass(frozen=True, slots=True)
class JoinedNodes:
    """The join for executed nodes that are not in the file, or replace more than the file node of their name."""

    file_nodes_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Executed node -> file nodes that it replaces."""
    rewritten_with: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Executed node that replaces no file node -> file nodes that ONNX Runtime rewrote when it added the node."""
    ambiguous: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Executed node of a region that could not be divided -> file nodes that it may replace in part."""


def join_graphs(
    order: Sequence[str],
    exported: Nodes,
    graph: OptimisedGraph,
    inputs: Collection[str],
    known: Names,
    candidates: Names,
) -> JoinedNodes:
    """Join executed nodes with file nodes by the tensors of both graphs.

    Args:
        order: Executed nodes in the order of execution.
        exported: Nodes of the file's main graph.
        inputs: Names of the graph's inputs.
        known: Executed node -> file nodes, from other sources.
        candidates: Executed node -> file nodes that may contain it; empty: it needs no join.
    """
    nodes = [ExecutedNode(name, graph.nodes[name].op_type if name in graph.nodes else None, None) for name in order]
    owners = _owners(order, exported, known)
    found = _join_regions(nodes, exported, graph, inputs, {**candidates, **known}, owners)
    owners |= {each: name for name, behind in found.file_nodes_of.items() for each in behind}
    named = _by_prefix((name for name in order if name not in {**known, **found.rewritten_with}), exported, owners)
    return JoinedNodes({**named, **known, **found.file_nodes_of}, found.rewritten_with, found.ambiguous)


def join_in_order(
    order: Sequence[ExecutedNode], exported: Nodes, listed: Mapping[str, str], known: Names, candidates: Names
) -> JoinedNodes:
    """Join executed nodes with file nodes without an optimised graph. `listed`: providers in the assignment list.

    By name; by operator if only one file node and one executed node of it are left on a provider; then fused nodes of
    one operator in the order of the file.
    """
    names = [node.name for node in order]
    owners = _owners(names, exported, known)
    named = _by_prefix((name for name in names if name not in known), exported, owners)
    owners |= {each: name for name, behind in named.items() for each in behind}
    gone = [name for name in exported if name in listed and name not in owners and exported[name].op_type not in FOLDED]
    known_names = {*exported, *known, *candidates, *named}
    new = [node for node in order if node.name not in known_names and node.op_type not in MEMCPY_OPS]
    new = [node for node in new if not node.name.startswith(INLINED)]
    region = _Region(_File(exported, order, owners), gone, new)

    def suited(name: str, nodes: Iterable[ExecutedNode]) -> list[ExecutedNode]:
        """The executed nodes of the provider and of the operator of a file node, as far as known."""
        near = [node for node in nodes if node.provider in (None, listed[name])]
        return [node for node in near if node.op_type is None or node.is_related(exported[name])]

    called = region.called_after()
    for name, nodes in called.items():
        if len(own := suited(name, nodes)) == 1:
            region.executed_by_file_node[name] = own[0].name
    left = region.unmatched_file_nodes
    free = {name: [node for node in suited(name, region.unmatched_executed_nodes) if node.op_type] for name in left}
    counts = Counter(node for nodes in free.values() for node in nodes)
    for name, nodes in free.items():
        if len(nodes) == 1 and counts[nodes[0]] == 1:
            region.executed_by_file_node[name] = nodes[0].name
    groups = _unmatched_groups(region)
    fused = [node for node in region.unmatched_executed_nodes if node.op_type not in LAYOUT]
    if len(groups) == len(fused) and len({node.op_type for node in fused}) == 1:
        for group, node in zip(groups, fused, strict=True):
            region.executed_by_file_node.update(dict.fromkeys(group, node.name))
    return JoinedNodes({**named, **known, **region.shares()})


def _unmatched_groups(region: _Region) -> list[list[str]]:
    """Several connected file nodes without an executed node, also of fusions before the assignment list."""
    left: dict[str, list[str]] = {}
    for name, node in region.file.nodes.items():
        computed = any(region.owner(each) or each in left for each in region.file.before(name).values())
        if region.owner(name) is None and node.op_type not in FOLDED and (computed or name in region.names):
            made = {tensor for each in left for tensor in region.file.nodes[each].outputs}
            left[name] = [*made.intersection(node.inputs), *filter(None, node.outputs)]
    return [names for names in connected(left) if len(names) > 1]


def _owners(order: Collection[str], exported: Nodes, known: Names) -> dict[str, str]:
    """The executed node of each file node that is `known` or executed under its own name."""
    owners = {each: name for name, behind in known.items() for each in behind}
    return owners | {name: name for name in order if name in exported}


def _by_prefix(names: Iterable[str], exported: Nodes, owners: Owners) -> dict[str, tuple[str, ...]]:
    """Executed node -> file nodes without an owner whose names are prefixes of its name: `NAME/GeluFusion/`."""
    found = {name: naming.replaced_by(name, exported) for name in names if name not in exported}
    left = {name: tuple(each for each in behind if each not in owners) for name, behind in found.items()}
    return {name: behind for name, behind in left.items() if behind}


class _File:
    """The file's graph, and the known owners of its nodes."""

    def __init__(self, nodes: Nodes, order: Sequence[ExecutedNode], owners: Owners) -> None:
        self.nodes = nodes
        self.owners = owners
        self.places = {node.name: place for place, node in enumerate(order)}
        computed = {name: node for name, node in nodes.items() if node.op_type not in FOLDED}
        self.makers, self.readers = edges(computed)
        self.heads = edges(nodes)[0] | {name: name for name in nodes}

    def before(self, name: str) -> dict[str, str]:
        """Inputs of a node -> their producers."""
        return {tensor: self.makers[tensor] for tensor in self.nodes[name].inputs if tensor in self.makers}

    def consumers(self, name: str) -> list[str]:
        """The consumers of a node."""
        return [each for tensor in self.nodes[name].outputs for each in self.readers.get(tensor, ())]


@dataclass(frozen=True, slots=True)
class _Region:
    """File nodes to join, and the executed nodes that may replace them, both in order."""

    file: _File
    names: Sequence[str]
    executed: Sequence[ExecutedNode]
    executed_by_file_node: dict[str, str] = field(default_factory=dict)
    """File node -> executed node, filled step by step."""

    @property
    def unmatched_file_nodes(self) -> list[str]:
        """File nodes without an executed node."""
        return [name for name in self.names if name not in self.executed_by_file_node]

    @property
    def unmatched_executed_nodes(self) -> list[ExecutedNode]:
        """Executed nodes without a file node."""
        used = set(self.executed_by_file_node.values())
        return [node for node in self.executed if node.name not in used]

    def owner(self, name: str) -> str | None:
        """The executed node that replaces a file node; None if unknown."""
        return self.executed_by_file_node.get(name) or self.file.owners.get(name)

    def called_after(self) -> dict[str, list[ExecutedNode]]:
        """Unjoined file node -> executed nodes with its name or its output's as a prefix, e.g. `a_nchwc`."""
        found: dict[str, list[ExecutedNode]] = {name: [] for name in self.unmatched_file_nodes}
        for node in self.unmatched_executed_nodes:
            cuts = [node.name[:at] for at, letter in enumerate(node.name) if letter in MARKS]
            name = next((self.file.heads[cut] for cut in reversed(cuts) if cut in self.file.heads), "")
            if name in found and node.name not in self.file.nodes:
                found[name].append(node)
        return {name: nodes for name, nodes in found.items() if nodes}

    def pair_in_order(self, ours: Sequence[ExecutedNode], theirs: Sequence[str]) -> None:
        """Join executed nodes with file nodes in order, if their numbers are equal."""
        if len(ours) == len(theirs):
            self.executed_by_file_node.update(zip(theirs, (node.name for node in ours), strict=True))

    def merge(self, names: Sequence[str], targets: Collection[str]) -> None:
        """Join each file node with the executed node of its inputs, else with that of its consumers.

        Of several producers, the last executed node is chosen, because it can read the outputs of the others. An
        executed node replaces no further node if another node reads its present output: the Sigmoid of a SiLU is not
        computed in the Conv before it, because the Mul also reads the output of the Conv.

        Args:
            names: File nodes in order.
            targets: Executed nodes that may replace further nodes.
        """
        place = self.file.places.__getitem__
        for name in names:
            sources = {
                tensor: self.executed_by_file_node.get(maker) for tensor, maker in self.file.before(name).items()
            }
            last = max(filter(None, sources.values()), key=place, default="")
            needed = (tensor for tensor, owner in sources.items() if owner == last)
            if last in targets and all(self._readers(tensor, name) <= {last, None} for tensor in needed):
                self.executed_by_file_node[name] = last
        for name in reversed(names):
            readers = {owner for each in self.file.consumers(name) if (owner := self.owner(each)) is not None}
            first = min(readers, key=place, default="")
            if name not in self.executed_by_file_node and first in targets:
                self.executed_by_file_node[name] = first

    def _readers(self, tensor: str, name: str) -> set[str | None]:
        """The executed nodes of the consumers of a tensor, without the file node `name`."""
        return {self.owner(each) for each in self.file.readers.get(tensor, ()) if each != name}

    def shares(self) -> dict[str, tuple[str, ...]]:
        """Executed node -> file nodes joined with it, without file nodes that are executed themselves."""
        found: dict[str, tuple[str, ...]] = {}
        for name in self.file.nodes:
            if name in self.executed_by_file_node and name not in self.file.places:
                found[self.executed_by_file_node[name]] = (*found.get(self.executed_by_file_node[name], ()), name)
        return found


def _join_regions(
    order: Sequence[ExecutedNode],
    exported: Nodes,
    graph: OptimisedGraph,
    inputs: Collection[str],
    candidates: Names,
    owners: Owners,
) -> JoinedNodes:
    """Divide the regions between the shared tensors.

    `candidates`: executed node -> file nodes that may contain it. `owners`: known executed nodes of file nodes.
    """
    file, by_name = _File(exported, order, owners), {node.name: node for node in order}
    cut = Cut(exported, graph.with_file_tensors(by_name), inputs)
    joined = JoinedNodes()
    for part in cut.regions():
        gone = dict.fromkeys(name for name in part.file if name not in by_name)
        others = [name for name in part.executed if name not in exported]
        if any(not graph.unnamed_node_outputs.isdisjoint(cut.executed[name].inputs) for name in part.executed):
            joined.ambiguous.update(dict.fromkeys(others, tuple(gone)))
            continue  # one of its executed nodes has no name
        if len(part.executed) == 1:
            names = tuple(name for name in part.file if name in gone)
            joined.file_nodes_of.update({part.executed[0]: names} if names else {})
            continue
        come_from = {name: gone.keys() & set(candidates[name]) for name in part.executed if name in candidates}
        for name, functions in come_from.items():
            if len(functions) == 1:
                joined.file_nodes_of[name] = tuple(functions)
        added = [name for name in part.added if name not in candidates]
        region = _Region(
            file=file,
            names=[name for name in part.file if owners.get(name, name) == name],
            executed=[by_name[name] for name in part.executed if name not in candidates],
        )
        if added:  # otherwise nodes were only moved or removed
            _divide(region, added, set().union(*come_from.values()))
        moved = {
            name: own for name, own in region.executed_by_file_node.items() if exported[name].op_type not in REMOVABLE
        }
        if added and cut.fits(part, moved):
            shares = region.shares()
            joined.file_nodes_of.update(shares)
            rewritten = [name for name in part.file if name in gone and name in region.executed_by_file_node]
            rewritten = rewritten or [name for name in part.changed if name in part.file]
            idle = [name for name in added if name not in shares and rewritten]
            joined.rewritten_with.update(dict.fromkeys(idle, tuple(rewritten)))
        elif added:
            joined.ambiguous.update(dict.fromkeys(others, tuple(gone)))
    return joined


def _divide(region: _Region, added: Sequence[str], functions: Collection[str]) -> None:
    """Join file nodes of a region, `functions` only by name and operator. `added`: executed nodes not in the file."""
    region.executed_by_file_node.update({node.name: node.name for node in region.executed if node.name in region.names})
    called = region.called_after().items()
    region.executed_by_file_node.update({name: nodes[0].name for name, nodes in called if len(nodes) == 1})
    for exact in (True, False):
        for kind in {node.op_type: node for node in region.executed}.values():
            left = [(name, region.file.nodes[name]) for name in region.unmatched_file_nodes]
            names = [name for name, node in left if (node.op_type == kind.op_type if exact else kind.is_related(node))]
            ours = [node for node in region.unmatched_executed_nodes if node.op_type == kind.op_type]
            region.pair_in_order(ours, names)
    region.merge([name for name in region.unmatched_file_nodes if name not in functions], added)
