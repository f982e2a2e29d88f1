"""Groups of nodes that ONNX Runtime rewrote together after it had placed them, as for another layout of tensors. Pure.

With more than one name for a tensor on the way (`ReorderInput` -> `pool_nchwc` -> `ReorderOutput` in the place of one
MaxPool), no node of such a group makes a tensor of the file from tensors of the file; the group as a whole does. So it
is followed back as if it were one node, and what it replaced is shared out among its members. Seen with the CPU
provider's blocked layout, which it uses where the number of channels is a multiple of its block: 8 with AVX2, 16 with
AVX-512 (onnxruntime/core/optimizer/nchwc_transformer.cc), so that one model gives other nodes on another machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from partita.diagnosis import fusion
from partita.diagnosis.optimised_graph import MEMCPY_OPS, OptimisedGraph
from partita.observations.facts import GraphNode

MARKS = ("_", "/")
"""What ONNX Runtime puts between the name that it takes over and what it adds."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that are not in the file and hang together by tensors that it does not have."""

    shares: Mapping[str, tuple[str, ...]]
    """What each member took the place of, itself aside; members that do none of the file's work have no entry."""
    replaced: tuple[str, ...]
    """What the whole group took the place of, in the order of the file."""
    members: tuple[str, ...]
    """Those that are not what the file has under their name."""


def find_groups(
    order: Collection[str],
    exported: Mapping[str, GraphNode],
    graph: OptimisedGraph | None,
    inputs: Collection[str],
    known: Collection[str],
    told: Collection[str] = (),
) -> tuple[Group, ...]:
    """The groups whose work in the file is clear; `inputs` are the graph's, `known` are nodes that need no group, and
    `told` exported nodes whose work such a node does.
    """
    if graph is None:
        return ()
    new = {
        name: node
        for name in order
        if (node := graph.nodes.get(name)) is not None
        and name not in known
        and node.op_type not in MEMCPY_OPS
        and fusion.is_new(node, exported.get(name))
    }
    makers, readers = fusion.edges(exported)
    of_file = {*makers, *readers, *inputs}
    there = {graph.original(tensor) for tensor in graph.makers}
    found = []
    for names in _connected(new, graph, of_file):
        members = [new[name] for name in order if name in names]
        if not any(_is_other(node, exported) for node in members):
            continue  # what is beside them was fused or moved; they are what they were
        followed = _followed_back(members, graph, exported, makers, order, inputs)
        replaced = tuple(name for name in followed if name not in told)
        if replaced:
            weights = {tensor for node in members for tensor in node.inputs if tensor and tensor not in graph.makers}
            weights |= {tensor for name in replaced for tensor in exported[name].inputs if tensor not in makers}
            weights -= {"", *inputs}
            gone = tuple(name for name in replaced if name not in new)
            others = tuple(name for name in names if _is_other(new[name], exported))
            home = _shared_out(members, replaced, exported, weights, there)
            if not _as_connected(members, home, exported, graph):
                continue
            shares = {
                node.name: tuple(name for name in replaced if home.get(name) == node.name != name)
                for node in members
                if node.name in home.values()
            }
            if len(others) == len(names) or set(gone) <= {each for share in shares.values() for each in share}:
                found.append(Group(shares, gone, others))
    counts = [each for group in found for each in group.replaced]
    return tuple(group for group in found if all(counts.count(each) == 1 for each in group.replaced))


def _is_other(node: GraphNode, exported: Mapping[str, GraphNode]) -> bool:
    """Whether a node is none of the file, or another operator than the file has under this name."""
    known = exported.get(node.name)
    return known is None or (known.op_type, known.domain) != (node.op_type, node.domain)


def _connected(new: Mapping[str, GraphNode], graph: OptimisedGraph, of_file: Collection[str]) -> list[list[str]]:
    """New nodes in groups; a group of one is left out, for that node was followed back by itself."""
    inside = {
        name: GraphNode(
            node.name,
            node.op_type,
            node.domain,
            _only_new(node.inputs, graph, of_file),
            _only_new(node.outputs, graph, of_file),
            None,
            None,
            None,
        )
        for name, node in new.items()
    }
    return [group for group in fusion.connected(inside) if len(group) > 1]


def _only_new(tensors: Sequence[str], graph: OptimisedGraph, of_file: Collection[str]) -> tuple[str, ...]:
    """Those tensors that a node made and that the file does not have; constants connect nothing."""
    return tuple(each for each in tensors if graph.original(each) not in of_file and each in graph.makers)


def _followed_back(
    members: Sequence[GraphNode],
    graph: OptimisedGraph,
    exported: Mapping[str, GraphNode],
    makers: Mapping[str, str],
    order: Collection[str],
    inputs: Collection[str],
) -> tuple[str, ...]:
    """Exported nodes between what the group reads and what it makes, in the order of the file; empty when not clear.

    Among them are members that kept their names, and read or make tensors in the other form.
    """
    made = {tensor for node in members for tensor in node.outputs if tensor}
    reads = tuple(dict.fromkeys(tensor for node in members for tensor in node.inputs if tensor and tensor not in made))
    whole = GraphNode("", "", "", reads, tuple(made), None, None, None)
    others = set(order).difference(node.name for node in members)
    claimed = fusion.walk_back(whole, graph, exported, makers, others, inputs)
    return tuple(name for name in exported if name in claimed)


def related(first: str, second: str) -> bool:
    """Whether two operators are one, or one is a form of the other and ends with its name, as NhwcMaxPool does."""
    return first.endswith(second) or second.endswith(first)


def _shared_out(
    members: Sequence[GraphNode],
    replaced: Sequence[str],
    exported: Mapping[str, GraphNode],
    weights: Set[str],
    there: Collection[str],
) -> dict[str, str]:
    """The member that does the work of each exported node; `members` in the order of execution.

    Members and exported nodes belong together by name, then in order, where there are as many of them: of one operator,
    then those that read `weights`, then of operators that are related. What is left was merged (`_merged`), or it is
    the work of the first member of no operator's own. `there`: tensors that are made as the graph runs.
    """
    home = _paired(members, [exported[name] for name in replaced], weights, _by_name(members, replaced, exported))
    others = [node.name for node in members if _is_other(node, exported)]  # one that is what it was does no more
    home |= _merged([node.name for node in members], replaced, exported, home, others, there)
    if len(others) == len(members):  # beside nodes of the file, it may be the work of none of them
        free = [name for name in others if name not in home.values()] or others
        for name in replaced:
            home.setdefault(name, free[len(free) // 2])
    return home


def _as_connected(
    members: Sequence[GraphNode], home: Mapping[str, str], exported: Mapping[str, GraphNode], graph: OptimisedGraph
) -> bool:
    """Whether members that do work read from each other, over those that do none, what their exported nodes do.

    Branches may run in another order than the file has them in, so that nodes told apart by their order are mixed up.
    """
    working = set(home.values())
    made = {graph.original(tensor): node.name for node in members for tensor in node.outputs if tensor}
    feeds: dict[str, set[str]] = {}
    for node in members:
        before = {made[tensor] for tensor in map(graph.original, node.inputs) if tensor in made}
        feeds[node.name] = {end for each in before for end in ({each} if each in working else feeds.get(each, ()))}
    makers, _ = fusion.edges({name: exported[name] for name in home})
    wanted: dict[str, set[str]] = {name: set() for name in working}
    for name, own in home.items():
        wanted[own] |= {home[makers[tensor]] for tensor in exported[name].inputs if tensor in makers} - {own}
    return all(feeds[name] == wanted[name] for name in working)


def _merged(
    members: Sequence[str],
    replaced: Sequence[str],
    exported: Mapping[str, GraphNode],
    paired: Mapping[str, str],
    others: Collection[str],
    there: Collection[str],
) -> dict[str, str]:
    """The member for each exported node that was merged into one: with what it reads where that can be, else with what
    reads it.

    Of several nodes that it reads, with the one that runs last: an Add of a convolution and a shortcut is computed in
    the convolution, which has the shortcut there by then. And only when nobody else needs what it reads from there: a
    Sigmoid whose input a Mul of another member reads, too, is not in the node that makes this input.
    """
    makers, readers = fusion.edges({name: exported[name] for name in replaced})
    place = {name: at for at, name in enumerate(members)}
    home = dict(paired)

    def alone(tensor: str, name: str, owner: str) -> bool:
        homes = {home.get(each, owner) for each in readers.get(tensor, ()) if each != name}
        return tensor not in there and homes <= {owner}

    for name in replaced:
        sources = {tensor: home[makers[tensor]] for tensor in exported[name].inputs if makers.get(tensor) in home}
        last = max(sources.values(), key=place.__getitem__, default=None)
        if name in home or last is None or last not in others:
            continue
        if all(alone(tensor, name, last) for tensor, owner in sources.items() if owner == last):
            home[name] = last
    for name in reversed(replaced):
        after = {home[each] for tensor in exported[name].outputs for each in readers.get(tensor, ()) if each in home}
        first = min(after, key=place.__getitem__, default=None)
        if name not in home and first is not None and first in others:
            home[name] = first
    return home


def _by_name(
    members: Sequence[GraphNode], replaced: Sequence[str], exported: Mapping[str, GraphNode]
) -> dict[str, str]:
    """The member that is called after each exported node, or after what it makes, as `a_nchwc` is, and the one on the
    way there that is of the member's own operator: that of a Conv is called after what the Relu behind it makes.

    None for a node that two members are called after.
    """
    heads = {tensor: name for name, node in exported.items() for tensor in node.outputs if tensor}
    heads |= {name: name for name in exported}
    gone = set(replaced) - {node.name for node in members}
    called: dict[str, list[GraphNode]] = {}
    for node in members:
        cuts = (node.name[:at] for at, letter in enumerate(node.name) if letter in MARKS)
        own = next((heads[cut] for cut in reversed(tuple(cuts)) if cut in heads), None)
        if own is not None and own in gone and node.name not in exported:
            called.setdefault(own, []).append(node)
    makers, _ = fusion.edges({name: exported[name] for name in gone})
    home = {name: nodes[0].name for name, nodes in called.items() if len(nodes) == 1}
    for end, (node, *_) in called.items():
        name, passed = end, []
        while not related(node.op_type, exported[name].op_type):
            before = {makers[tensor] for tensor in exported[name].inputs if tensor in makers}
            if len(before) != 1 or not before.isdisjoint(called):
                break
            (name,) = before
            passed.append(name)
        else:
            home |= dict.fromkeys(passed, node.name) if end in home else {}
    return home


def _paired(
    members: Sequence[GraphNode], replaced: Sequence[GraphNode], weights: Set[str], named: Mapping[str, str]
) -> dict[str, str]:
    """The member for each exported node that it can be told of: by its name, and by what the two have in common."""
    kept = {node.name for node in members}
    home = {node.name: node.name for node in replaced if node.name in kept} | dict(named)

    def pair(ours: Iterable[GraphNode], theirs: Iterable[GraphNode]) -> None:
        found = [node.name for node in ours if node.name not in home.values()]
        wanted = [node.name for node in theirs if node.name not in home]
        if len(found) == len(wanted):
            home.update(zip(wanted, found, strict=True))

    def weighted(nodes: Iterable[GraphNode]) -> list[GraphNode]:
        return [node for node in nodes if not weights.isdisjoint(node.inputs)]

    operators = tuple(dict.fromkeys(node.op_type for node in members))
    for op in operators:
        pair(*([node for node in nodes if node.op_type == op] for nodes in (members, replaced)))
    pair(weighted(members), weighted(replaced))
    for op in operators:
        pair(*([node for node in nodes if related(node.op_type, op)] for nodes in (members, replaced)))
    return home
