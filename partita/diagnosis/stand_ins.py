"""Which exported nodes each node that ran stands for, by everything that tells, the surest first. Pure.

The graphs tell of a node that makes tensors of the file from tensors of the file (`fusion`), and of a group that does
so as a whole (`rewritten`). What a node is called after goes last: of nodes that were fused, a name has one, and a node
that is taken for clear by its name is missing in its group, of which nothing can be told then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from partita.diagnosis import fusion, renamed, rewritten
from partita.diagnosis.optimised_graph import OptimisedGraph
from partita.diagnosis.rewritten import Group
from partita.observations.facts import AssignedNode, GraphNode


@dataclass(frozen=True, slots=True)
class StandIns:
    """Nodes that are not the file's, or do more than those of the file."""

    stands_for: dict[str, tuple[str, ...]]
    """Exported nodes that each took the place of, in the order of the file where several sources tell of them."""
    beside: dict[str, tuple[str, ...]]
    """For each that was added while others were rewritten, the exported nodes that were."""


def find_stand_ins(
    order: Sequence[renamed.Ran],
    exported: Mapping[str, GraphNode],
    compiled: Mapping[str, tuple[AssignedNode, ...]],
    graph: OptimisedGraph | None,
    inputs: Collection[str],
    listed: Mapping[str, str],
    unfolded: Mapping[str, tuple[str, ...]],
    others: Collection[str],
) -> StandIns:
    """Join the sources. `inputs` are the graph's, `listed` is the provider of each node that was placed, `unfolded` has
    nodes of functions, and `others` nodes of which other sources tell.
    """
    names = dict.fromkeys(each.name for each in order)
    walked = fusion.stand_ins(names, exported, compiled, graph, inputs)
    sure = {**unfolded, **walked}
    clear, told = {*sure, *others, *compiled}, _all(sure)
    known = {*sure, *compiled}
    named = fusion.by_name(names, exported, graph, known, told)
    if graph is None:
        homes = {each: name for name, behind in (sure | named).items() for each in behind}
        groups = renamed.find_renamed(order, exported, listed, {*clear, *named}, homes)
    else:
        groups = rewritten.find_groups(names, exported, graph, inputs, clear, told)
        known |= {name for group in groups for name in (*group.members, *group.shares)}
        told |= {name for group in groups for name in group.replaced}
        named = fusion.by_name(names, exported, graph, known, told)
        # A group that is not clear as a whole may be without nodes that a name tells of.
        groups += rewritten.find_groups(names, exported, graph, inputs, {*clear, *known, *named}, {*told, *_all(named)})
    shares = [(name, behind) for group in groups for name, behind in group.shares.items() if behind]
    stands_for = named | sure
    place = {name: at for at, name in enumerate(exported)}
    for name, behind in shares:
        stands_for[name] = tuple(sorted({*stands_for.get(name, ()), *behind}, key=place.__getitem__))
    return StandIns(stands_for, _beside(groups))


def _all(behind: Mapping[str, Sequence[str]]) -> set[str]:
    """Every exported node of which it is told."""
    return {each for names in behind.values() for each in names}


def _beside(groups: Sequence[Group]) -> dict[str, tuple[str, ...]]:
    """What the nodes of each group that do no work were added beside."""
    return {name: group.replaced for group in groups for name in group.members if name not in group.shares}
