"""Nodes that ONNX Runtime rewrote after it had placed them, where it wrote no graph that would tell. Pure.

That is so with every provider that compiles. What is left to go by: the list of what was placed, which has the node by
its own name; the plan, which has another in its place (`p_nchwc` after the tensor that a node made, `conv_token_1`
after a node), in the order of execution; and the profile, which has operators and providers. So a node that was placed
and is not in the plan is looked for among those that are in the plan alone: by name, then by where its neighbours run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from partita.diagnosis import fusion
from partita.diagnosis.optimised_graph import MEMCPY_OPS
from partita.diagnosis.rewritten import MARKS, Group, related
from partita.observations.facts import GraphNode
from partita.observations.names import INLINED


@dataclass(frozen=True, slots=True)
class Ran:
    """A node of the plan."""

    name: str
    op_type: str | None
    provider: str | None


@dataclass(slots=True)
class _Search:
    """The nodes that are to be joined, and what is joined so far."""

    gone: dict[str, GraphNode]
    """Exported nodes that were placed and do not run."""
    new: list[Ran]
    """Nodes that run and that the file does not have."""
    listed: Mapping[str, str]
    """The provider of each node that was placed."""
    exported: Mapping[str, GraphNode]
    places: dict[str, int]
    """Where each node is in the order."""
    makers: dict[str, str]
    """Which exported node makes each tensor."""
    readers: dict[str, list[str]]
    """Which ones read it."""
    told: Mapping[str, str]
    """For exported nodes of which another source tells, the one that does their work."""
    home: dict[str, str] = field(default_factory=dict)
    """For each exported node that was found, the one that does its work."""

    def place(self, name: str) -> int | None:
        """Where the work of an exported node is done; None when that is not known."""
        return self.places.get(self.home.get(name) or self.told.get(name, name))

    def alone(self, tensor: str, name: str, owner: str) -> bool:
        """Whether a node that `owner` does the work of may make `tensor` for the exported node `name` alone: nothing
        that runs reads it, and no node whose work is done elsewhere.
        """
        others = [each for each in self.readers.get(tensor, ()) if each != name]
        others = [each for each in others if self.exported[each].op_type not in fusion.FOLDED]
        homes = {self.home.get(each) or self.told.get(each, owner) for each in others}
        return homes <= {owner} and not any(each in self.places for each in others)

    def window(self, name: str) -> tuple[int, int]:
        """The places before and after those at which an exported node can run, by those of its neighbours."""
        node = self.exported[name]
        before = [self.place(self.makers[tensor]) for tensor in node.inputs if tensor in self.makers]
        after = [self.place(each) for tensor in node.outputs for each in self.readers.get(tensor, ())]
        return (
            max((place for place in before if place is not None), default=-1),
            min((place for place in after if place is not None), default=len(self.places)),
        )

    def between(self, name: str) -> list[Ran]:
        """New nodes of the provider of an exported node that run where it could."""
        first, last = self.window(name)
        return [
            each
            for each in self.new
            if first < self.places[each.name] < last and each.provider in (None, self.listed[name])
        ]

    def join(self, claims: Mapping[str, Sequence[str]]) -> None:
        """Take over what is clear: one new node for an exported one, and no other exported node that it is for."""
        counts = Counter(each for found in claims.values() for each in found)
        self.home |= {name: found[0] for name, found in claims.items() if len(found) == 1 and counts[found[0]] == 1}


def find_renamed(
    order: Sequence[Ran],
    exported: Mapping[str, GraphNode],
    listed: Mapping[str, str],
    known: Collection[str],
    told: Mapping[str, str],
) -> tuple[Group, ...]:
    """Nodes of `order` that do the work of exported ones, and what ONNX Runtime added around each.

    `listed`: the provider of each node that was placed. `known`: nodes of the order that need no joining. `told`: what
    is known to do the work of exported nodes.
    """
    running = {each.name for each in order}
    makers, readers = fusion.edges(exported)
    search = _Search(
        gone={
            name: node
            for name, node in exported.items()
            if name in listed and name not in running and name not in told and node.op_type not in fusion.FOLDED
        },
        new=[each for each in order if _is_new(each, exported, known)],
        listed=listed,
        exported=exported,
        places={each.name: place for place, each in enumerate(order)},
        makers=makers,
        readers=readers,
        told=told,
    )
    if not search.gone or not search.new:
        return ()
    search.join({name: _named_after(name, node, search) for name, node in search.gone.items()})
    for _ in search.gone:
        joined = len(search.home)
        search.join({name: _in_its_place(name, search) for name in search.gone if name not in search.home})
        if len(search.home) == joined:
            break
    return tuple(_groups(search))


def _is_new(node: Ran, exported: Mapping[str, GraphNode], known: Collection[str]) -> bool:
    """Whether a node of the plan is neither the file's nor joined with it, nor a copy or of a function."""
    theirs = node.op_type in MEMCPY_OPS or node.name.startswith(INLINED)
    return node.name not in exported and node.name not in known and not theirs


def _named_after(name: str, node: GraphNode, search: _Search) -> list[str]:
    """New nodes that are called after an exported node or what it makes, and after none with a longer name."""
    names = {each: own for own, gone in search.gone.items() for each in (own, *filter(None, gone.outputs))}
    found = []
    for each in search.new:
        heads = [head for head in names if each.name.startswith(tuple(head + mark for mark in MARKS))]
        longest = max(heads, key=len, default="")
        fits = each.op_type is None or related(each.op_type, node.op_type)
        if names.get(longest) == name and fits and each.provider in (None, search.listed[name]):
            found.append(each.name)
    return found


def _in_its_place(name: str, search: _Search) -> list[str]:
    """New nodes of an exported node's operator that run where it would, and are no other's."""
    taken = set(search.home.values())
    return [
        each.name
        for each in search.between(name)
        if each.op_type is not None and each.name not in taken and related(each.op_type, search.gone[name].op_type)
    ]


def _merge(name: str, search: _Search) -> None:
    """Join an exported node with the one that does the work of all that it reads, of several with the last that runs,
    where nobody else needs what it reads from there; else with the one that does the work of all its readers.
    """
    node = search.exported[name]
    sources = {tensor: search.home.get(search.makers[tensor]) for tensor in node.inputs if tensor in search.makers}
    owners = [owner for owner in sources.values() if owner is not None]
    if name in search.home or not owners or len(owners) < len(sources):
        return
    last = max(owners, key=search.places.__getitem__)
    if all(search.alone(tensor, name, last) for tensor, owner in sources.items() if owner == last):
        search.home[name] = last
        return
    readers = [each for tensor in node.outputs for each in search.readers.get(tensor, ())]
    after = {search.home.get(each) or search.told.get(each) for each in readers}
    if len(after) == 1 and (owner := after.pop()) is not None:
        search.home[name] = owner


def _groups(search: _Search) -> list[Group]:
    """A group for each node that was found, with what was merged with it and what was added around it."""
    for name in search.gone:  # in the file's order, so what is merged comes after what it is merged with
        _merge(name, search)
    behind: dict[str, list[str]] = {}
    for name in search.gone:
        if name in search.home:
            behind.setdefault(search.home[name], []).append(name)
    added: dict[str, list[str]] = {}
    told: dict[str, list[str]] = {}
    for name in search.told.keys() & search.listed.keys():
        told.setdefault(search.told[name], []).append(name)
    left = [each.name for each in search.new if each.name not in behind]
    for own, replaced in behind.items():
        around = {each.name for name in (*replaced, *told.get(own, ())) for each in search.between(name)}
        for each in [each for each in left if each in around]:
            added.setdefault(own, []).append(each)
            left.remove(each)
    return [
        Group({own: tuple(replaced)}, tuple(replaced), (own, *added.get(own, ()))) for own, replaced in behind.items()
    ]
