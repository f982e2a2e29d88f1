"""Which node of one report is which of another: by name, then by what a name stands for. Pure.

Names that ONNX Runtime makes carry counters of the process (`Memcpy_token_4`, `OpenVINO-EP-subgraph_3_0`), so two runs
of one model have other names for the same thing. Nodes of the file keep theirs; so a compiled or fused node is taken
apart into the nodes it stands for, a copy is known by its tensor, and only what is left is matched by the shape of its
name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from partita.partition_reports.node_keys import DIGITS, is_added, keyed, stands_for
from partita.partition_reports.records import Copy, NodePlacement, Phase

COUNTER = re.compile(r"_\d+$")
Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class Unit:
    """A node of the file, or one that ONNX Runtime added, and the node of the plan that does its work."""

    key: str
    """Equal in two reports when both mean the same node by their names."""
    name: str
    node: NodePlacement
    added: bool
    """ONNX Runtime's own: the file does not have it."""


def operator_of(*units: Unit) -> str | None:
    """Operator of one node in several phases: its own where it runs under its name, else the one it is named for."""
    own = [unit.node.op_type for unit in units if unit.node.name == unit.name and unit.node.op_type]
    tail = units[0].name.rpartition("/")[2] if "/" in units[0].name else ""
    return own[0] if own else COUNTER.sub("", tail) or units[0].node.op_type


def units(phase: Phase) -> tuple[Unit, ...]:
    """The nodes of a phase as the file has them, in execution order, without Memcpy nodes: those are copies."""
    return tuple(
        Unit(key, name, node, is_added(node))
        for node in keyed(phase.nodes)
        for key, name in zip(node.keys, stands_for(node), strict=False)
    )


@dataclass(frozen=True, slots=True)
class Pairs:
    """Units of two phases: those that are in both, and those that are in one."""

    both: tuple[tuple[Unit, Unit], ...]
    renamed: tuple[tuple[Unit, Unit], ...]
    """Also in `both`: the same operator of the same module under another number."""
    gone: tuple[Unit, ...]
    came: tuple[Unit, ...]

    @property
    def by_name(self) -> int:
        """How many nodes both phases have under one name; of what ONNX Runtime added, under one kind of name."""
        return len(self.both) - len(self.renamed)


def pair_units(before: Sequence[Unit], after: Sequence[Unit]) -> Pairs:
    """Match by name; what is left by name without its number, where both sides have the same count of it."""
    later = {unit.key: unit for unit in after}
    both = [(unit, later[unit.key]) for unit in before if unit.key in later]
    known = {unit.key for unit, _ in both}
    gone = [unit for unit in before if unit.key not in known]
    came = [unit for unit in after if unit.key not in known]
    renamed = _pair_leftovers(gone, came, _numberless)
    added = _pair_leftovers(gone, came, _kind_of_added)
    taken = {id(unit) for pair in (*renamed, *added) for unit in pair}
    return Pairs(
        (*both, *renamed, *added),
        tuple(renamed),
        tuple(unit for unit in gone if id(unit) not in taken),
        tuple(unit for unit in came if id(unit) not in taken),
    )


def _numberless(unit: Unit) -> Hashable:
    """What is left of a file node's name without the exporter's number at its end; None for what was added."""
    return None if unit.added else COUNTER.sub("", unit.name)


def _kind_of_added(unit: Unit) -> Hashable:
    """Operator and shape of the name of what ONNX Runtime added; None for a node of the file."""
    return (unit.node.op_type, DIGITS.sub("#", unit.name)) if unit.added else None


def _pair_leftovers(
    before: Sequence[Thing], after: Sequence[Thing], role: Callable[[Thing], Hashable]
) -> list[tuple[Thing, Thing]]:
    """Pairs of the same role in order, for roles that both sides have equally often. A role of None has no pair."""
    ours, theirs = _by_role(before, role), _by_role(after, role)
    alike = [key for key in ours if len(ours[key]) == len(theirs.get(key, ()))]
    return [pair for key in alike for pair in zip(ours[key], theirs[key], strict=True)]


def _by_role(things: Iterable[Thing], role: Callable[[Thing], Hashable]) -> dict[Hashable, list[Thing]]:
    """Things in groups."""
    groups: dict[Hashable, list[Thing]] = {}
    for thing in things:
        key = role(thing)
        if key is not None:
            groups.setdefault(key, []).append(thing)
    return groups


@dataclass(frozen=True, slots=True)
class CopyPairs:
    """Copies of two phases."""

    both: tuple[tuple[Copy, Copy], ...]
    gone: tuple[Copy, ...]
    came: tuple[Copy, ...]


def pair_copies(before: Phase, after: Phase) -> CopyPairs:
    """Match copies at the border by name; Memcpy nodes by tensor, then cause, then bytes, never by their own name."""
    gone, came = list(before.copies), list(after.copies)
    roles: tuple[tuple[Callable[[Copy], Hashable], Callable[[Copy], Hashable]], ...] = (
        (_tensor_role, _tensor_role),
        (_cause_role(before), _cause_role(after)),
        (_size_role, _size_role),
    )
    both: list[tuple[Copy, Copy]] = []
    for ours, theirs in roles:
        groups, others = _by_role(gone, ours), _by_role(came, theirs)
        # Fewer on one side is fine here: of three copies of one tensor, two may have stayed.
        pairs = [pair for key in groups for pair in zip(groups[key], others.get(key, ()), strict=False)]
        both += pairs
        taken = {id(copy) for pair in pairs for copy in pair}
        gone = [copy for copy in gone if id(copy) not in taken]
        came = [copy for copy in came if id(copy) not in taken]
    return CopyPairs(tuple(both), tuple(gone), tuple(came))


def _tensor_role(copy: Copy) -> Hashable:
    """What a copy moves, and which way."""
    if copy.kind != "memcpy_node":
        return (copy.kind, copy.name)
    return None if copy.tensor is None else (copy.direction, copy.tensor)


def _cause_role(phase: Phase) -> Callable[[Copy], Hashable]:
    """For whom a Memcpy node copies: nodes of the file, whatever they are called in the plan."""
    behind = {node.name: stands_for(node) for node in phase.nodes}

    def role(copy: Copy) -> Hashable:
        names = frozenset(name for cause in copy.caused_by for name in behind.get(cause, (cause,)))
        return (copy.direction, names) if copy.kind == "memcpy_node" and names else None

    return role


def _size_role(copy: Copy) -> Hashable:
    """The last resort: nothing is known of what it copies but how much."""
    unnamed = copy.kind == "memcpy_node" and not copy.tensor and not copy.caused_by
    return (copy.direction, copy.bytes_per_run) if unnamed else None
