"""The join of the file's graph with the executed nodes: the file nodes that each executed node replaces. Pure.

Both graphs are cut at the tensors that they share. A region with several executed nodes (`ReorderInput` -> `pool_nchwc`
-> `ReorderOutput` for one MaxPool) is divided by name, then by operator, then by data flow. A result that contradicts
the tensors of both graphs is dropped.

With a compiling provider there is no optimised graph. Then nodes are joined by name and operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from partita.diagnosis import naming
from partita.diagnosis.graphs import FOLDED, LAYOUT, MEMCPY_OPS, Cut, Graph, OptimisedGraph, Region, connected
from partita.observations.names import INLINED

MARKS = ("_", "/")
"""Characters that ONNX Runtime appends to a name that it reuses."""
REMOVABLE = frozenset({"Identity", "Cast"})
"""Operators that ONNX Runtime removes if they have no effect: readers of the output then read the input."""
Names = Mapping[str, tuple[str, ...]]
"""Executed node -> file nodes."""


def is_related(op_type: str | None, of_file: str) -> bool:
    """Whether an executed operator is that of a file node or a variant, e.g. NhwcMaxPool of MaxPool."""
    return op_type is not None and (op_type.endswith(of_file) or of_file.endswith(op_type))


class Join:
    """The join of a session, for executed nodes that are not in the file or replace more than the node of their name.

    Args:
        ops: Executed node -> its operator, in the order of execution; None if neither graph nor profile has the node.
        file: The file's main graph.
        known: Executed node -> file nodes, from other sources.
    """

    def __init__(self, ops: Mapping[str, str | None], file: Graph, known: Names) -> None:
        self.ops, self.file = ops, file
        self.computed = Graph(node for node in file.nodes.values() if node.op_type not in FOLDED)
        self.places = {name: place for place, name in enumerate(ops)}
        self.owners = {each: name for name, behind in known.items() for each in behind}
        """File node -> the executed node that is known to replace it, or that has its name."""
        self.owners |= {name: name for name in ops if name in file.nodes}
        self.file_nodes_of = dict(known)
        """Executed node -> file nodes that it replaces."""
        self.rewritten_with: dict[str, tuple[str, ...]] = {}
        """Executed node that replaces no file node -> file nodes that ONNX Runtime rewrote when it added the node."""
        self.ambiguous: dict[str, tuple[str, ...]] = {}
        """Executed node of a region that could not be divided -> file nodes that it may replace in part."""

    def by_tensors(self, graph: OptimisedGraph, inputs: Collection[str], candidates: Names) -> None:
        """Join by the tensors of both graphs.

        Args:
            inputs: Names of the graph's inputs.
            candidates: Executed node -> file nodes that may contain it; empty: it needs no join.
        """
        cut, found = Cut(self.file, graph.with_file_tensors(self.ops), inputs), dict[str, tuple[str, ...]]()
        candidates = {**candidates, **self.file_nodes_of}
        for region in cut.regions():
            gone = tuple(name for name in region.file if name not in self.ops)
            read = {tensor for name in region.executed for tensor in cut.executed.nodes[name].inputs}
            shares: Names | None = {}
            if not graph.unnamed_node_outputs.isdisjoint(read):  # one of its executed nodes has no name
                shares = None
            elif len(region.executed) > 1:
                shares = self._divide_region(cut, region, gone, candidates, found)
            elif gone:
                shares = {region.executed[0]: gone}
            if shares is None:
                self.ambiguous |= dict.fromkeys((each for each in region.executed if each not in self.file.nodes), gone)
            found |= shares or {}
        self._add(found)
        self._by_prefix()

    def _divide_region(
        self, cut: Cut, region: Region, gone: Sequence[str], candidates: Names, found: dict[str, tuple[str, ...]]
    ) -> Names | None:
        """Executed node of a region -> file nodes of `gone` that it replaces; None if that is ambiguous.

        Adds nodes of functions with one candidate to `found`.
        """
        calls = {name: set(candidates[name]).intersection(gone) for name in region.executed if name in candidates}
        found |= {name: tuple(functions) for name, functions in calls.items() if len(functions) == 1}
        added = [name for name in region.executed if name in cut.added and name not in candidates]
        if not added:  # nodes were only moved or removed
            return {}
        names = [name for name in region.file if self.owners.get(name, name) == name]
        parts = _Division(self, names, [name for name in region.executed if name not in candidates])
        parts.divide(added, set().union(*calls.values()))
        moved = {name: own for name, own in parts.owners.items() if self.file.nodes[name].op_type not in REMOVABLE}
        if not cut.fits(region, moved):
            return None
        shares = parts.shares()
        rewritten = tuple(name for name in gone if name in parts.owners)
        rewritten = rewritten or tuple(name for name in region.executed if name in cut.changed and name in region.file)
        self.rewritten_with |= dict.fromkeys((name for name in added if name not in shares and rewritten), rewritten)
        return shares

    def by_names(self, listed: Mapping[str, str], providers: Mapping[str, str | None], known: Collection[str]) -> None:
        """Join without an optimised graph.

        By name; by operator if only one file node and one executed node of it are left on a provider; then fused nodes
        of one operator in the order of the file.

        Args:
            listed: Providers of nodes in the assignment list.
            providers: Providers of executed nodes.
            known: Executed nodes that need no join.
        """
        self._by_prefix()
        file = self.file.nodes
        gone = [name for name in self.computed.nodes if name in listed and name not in self.owners]
        done = {*file, *self.file_nodes_of, *known}
        new = [name for name, op in self.ops.items() if name not in done and op not in MEMCPY_OPS]
        parts = _Division(self, gone, [name for name in new if not name.startswith(INLINED)])

        def suited(name: str, nodes: Iterable[str]) -> list[str]:
            """The executed nodes of the provider and of the operator of a file node, as far as known."""
            near = [each for each in nodes if providers[each] in (None, listed[name])]
            return [each for each in near if self.ops[each] is None or is_related(self.ops[each], file[name].op_type)]

        for name, nodes in parts.called_after().items():
            if len(own := suited(name, nodes)) == 1:
                parts.owners[name] = own[0]
        left = parts.new
        free = {name: [each for each in suited(name, left) if self.ops[each]] for name in parts.gone}
        counts = Counter(each for nodes in free.values() for each in nodes)
        parts.owners |= {name: nodes[0] for name, nodes in free.items() if len(nodes) == 1 and counts[nodes[0]] == 1}
        groups = parts.unmatched_groups()
        fused = [name for name in parts.new if self.ops[name] not in LAYOUT]
        if len(groups) == len(fused) and len({self.ops[name] for name in fused}) == 1:
            parts.owners |= {each: name for group, name in zip(groups, fused, strict=True) for each in group}
        self._add(parts.shares())

    def _add(self, found: Names) -> None:
        """Add executed nodes with the file nodes that they replace."""
        self.file_nodes_of |= found
        self.owners |= {each: name for name, behind in found.items() for each in behind}

    def _by_prefix(self) -> None:
        """Join file nodes without an owner whose names are prefixes of the name of a new node: `NAME/GeluFusion/`."""
        done = self.file.nodes.keys() | self.file_nodes_of.keys() | self.rewritten_with.keys()
        found = {name: naming.replaced_by(name, self.file.nodes) for name in self.ops if name not in done}
        left = {name: tuple(each for each in behind if each not in self.owners) for name, behind in found.items()}
        self._add({name: behind for name, behind in left.items() if behind})


class _Division:
    """File nodes to join, and the executed nodes that may replace them, both in order."""

    def __init__(self, join: Join, names: Sequence[str], executed: Sequence[str]) -> None:
        self.join, self.names, self.executed = join, names, executed
        self.owners: dict[str, str] = {}
        """File node -> executed node, filled step by step."""

    @property
    def gone(self) -> list[str]:
        """File nodes without an executed node."""
        return [name for name in self.names if name not in self.owners]

    @property
    def new(self) -> list[str]:
        """Executed nodes without a file node."""
        used = set(self.owners.values())
        return [name for name in self.executed if name not in used]

    def owner(self, name: str) -> str | None:
        """The executed node that replaces a file node; None if unknown."""
        return self.owners.get(name) or self.join.owners.get(name)

    def divide(self, added: Collection[str], functions: Collection[str]) -> None:
        """Join all file nodes, `functions` only by name and operator. `added`: executed nodes not in the file."""
        file, ops = self.join.file.nodes, self.join.ops
        self.owners |= {name: name for name in self.executed if name in self.names}
        self.owners |= {name: nodes[0] for name, nodes in self.called_after().items() if len(nodes) == 1}
        for exact in (True, False):
            for kind in dict.fromkeys(ops[name] for name in self.executed):
                names = [
                    name
                    for name in self.gone
                    if (file[name].op_type == kind if exact else is_related(kind, file[name].op_type))
                ]
                ours = [name for name in self.new if ops[name] == kind]
                if len(ours) == len(names):
                    self.owners |= dict(zip(names, ours, strict=True))
        self._merge([name for name in self.gone if name not in functions], added)

    def called_after(self) -> dict[str, list[str]]:
        """Unjoined file node -> executed nodes with its name or its output's as a prefix, e.g. `a_nchwc`."""
        file = self.join.file
        found: dict[str, list[str]] = {name: [] for name in self.gone}
        for node in self.new:
            cuts = [node[:at] for at, letter in enumerate(node) if letter in MARKS]
            name = next((cut for cut in reversed(cuts) if cut in file.nodes or cut in file.makers), "")
            name = name if name in file.nodes else file.makers.get(name, "")
            if name in found and node not in file.nodes:
                found[name].append(node)
        return {name: nodes for name, nodes in found.items() if nodes}

    def unmatched_groups(self) -> list[list[str]]:
        """Several connected file nodes without an executed node, also of fusions before the assignment list."""
        left: dict[str, list[str]] = {}
        for name, node in self.join.computed.nodes.items():
            computed = any(self.owner(each) or each in left for each in self.join.computed.before([name]))
            if self.owner(name) is None and (computed or name in self.names):
                made = {tensor for each in left for tensor in self.join.file.nodes[each].outputs}
                left[name] = [*made.intersection(node.inputs), *filter(None, node.outputs)]
        return [names for names in connected(left) if len(names) > 1]

    def _merge(self, names: Sequence[str], targets: Collection[str]) -> None:
        """Join each file node with the executed node of its inputs, else with that of its consumers.

        Of several producers, the last executed node is chosen, because it can read the outputs of the others. An
        executed node replaces no further node if another node reads its present output: the Sigmoid of a SiLU is not
        computed in the Conv before it, because the Mul also reads the output of the Conv.

        Args:
            names: File nodes in order.
            targets: Executed nodes that may replace further nodes.
        """
        graph, place = self.join.computed, self.join.places.__getitem__
        for name in names:
            makers = {tensor: graph.makers.get(tensor, "") for tensor in self.join.file.nodes[name].inputs}
            sources = {tensor: self.owners.get(maker) for tensor, maker in makers.items() if maker}
            last = max(filter(None, sources.values()), key=place, default="")
            needed = (tensor for tensor, owner in sources.items() if owner == last)
            others = {self.owner(each) for tensor in needed for each in graph.readers.get(tensor, ()) if each != name}
            if last in targets and others <= {last, None}:
                self.owners[name] = last
        for name in reversed(names):
            readers = {owner for each in graph.after([name]) if (owner := self.owner(each)) is not None}
            first = min(readers, key=place, default="")
            if name not in self.owners and first in targets:
                self.owners[name] = first

    def shares(self) -> dict[str, tuple[str, ...]]:
        """Executed node -> file nodes joined with it, without file nodes that are executed themselves."""
        found: dict[str, tuple[str, ...]] = {}
        for name in self.join.file.nodes:
            if name in self.owners and name not in self.join.places:
                found[self.owners[name]] = (*found.get(self.owners[name], ()), name)
        return found
