"""Matches nodes of two reports. Pure.

File nodes are matched by name, copies by tensor, and other added nodes by name without numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.file_nodes import placed, ran_by
from partita.partition_reports.records import Copy, FileNode, NodePlacement, Phase

COUNTER = re.compile(r"_\d+$")
DIGITS = re.compile(r"\d+")
Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class Unit:
    """A node of the file that was not folded, or a node that ONNX Runtime added."""

    key: str
    """Matching key: equal for the same node in two reports."""
    node: FileNode | NodePlacement

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.node.name

    @property
    def added(self) -> bool:
        """Whether ONNX Runtime added it, so that it is not in the file."""
        return isinstance(self.node, NodePlacement)

    @property
    def ran_as(self) -> tuple[str, ...]:
        """Names of the executed nodes."""
        return self.node.ran_as if isinstance(self.node, FileNode) else (self.node.name,)

    @property
    def runs_in(self) -> str | None:
        """The compiled or fused node, or the nodes of its function; None if it runs under its own name."""
        return None if self.name in self.ran_as or not self.ran_as else ", ".join(self.ran_as)


def units(phase: Phase) -> tuple[Unit, ...]:
    """The file nodes of a phase that were not folded, then added nodes other than Memcpy nodes.

    The key of an added node is its operator, its name without numbers, its provider, and a number if that is repeated:
    names from ONNX Runtime contain counters that differ between runs.
    """
    found = [Unit(row.name, row) for row in placed(phase)]
    seen: Counter[str] = Counter()
    for node in phase.nodes:
        if node.added and not is_memcpy(node):
            key = f"{node.op_type} {DIGITS.sub('#', node.name)} {node.provider}"
            seen[key] += 1
            found.append(Unit(f"{key} {seen[key]}", node))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Matched and unmatched units of two phases."""

    both: tuple[tuple[Unit, Unit], ...]
    renamed: tuple[tuple[Unit, Unit], ...]
    """Pairs of `both` whose names differ in their number."""
    gone: tuple[Unit, ...]
    came: tuple[Unit, ...]

    @property
    def by_name(self) -> int:
        """Number of pairs with the same name (without counters for nodes added by ONNX Runtime)."""
        return len(self.both) - len(self.renamed)


def pair_units(before: Sequence[Unit], after: Sequence[Unit]) -> Pairs:
    """Match by key; then the rest by name without number, if both sides have equally many."""
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
    """Name of a file node without the exporter's trailing number; None for an added node."""
    return None if unit.added else COUNTER.sub("", unit.name)


def _kind_of_added(unit: Unit) -> Hashable:
    """Operator and name without numbers of an added node; None for a file node."""
    return (unit.node.op_type, DIGITS.sub("#", unit.name)) if unit.added else None


def _pair_leftovers(
    before: Sequence[Thing], after: Sequence[Thing], role: Callable[[Thing], Hashable]
) -> list[tuple[Thing, Thing]]:
    """Pairs of equal role in order, for roles with equal counts on both sides; role None is not paired."""
    ours, theirs = _by_role(before, role), _by_role(after, role)
    alike = [key for key in ours if len(ours[key]) == len(theirs.get(key, ()))]
    return [pair for key in alike for pair in zip(ours[key], theirs[key], strict=True)]


def _by_role(things: Iterable[Thing], role: Callable[[Thing], Hashable]) -> dict[Hashable, list[Thing]]:
    """Things grouped by role."""
    groups: dict[Hashable, list[Thing]] = {}
    for thing in things:
        key = role(thing)
        if key is not None:
            groups.setdefault(key, []).append(thing)
    return groups


@dataclass(frozen=True, slots=True)
class CopyPairs:
    """Matched and unmatched copies of two phases."""

    both: tuple[tuple[Copy, Copy], ...]
    gone: tuple[Copy, ...]
    came: tuple[Copy, ...]


def pair_copies(before: Phase, after: Phase) -> CopyPairs:
    """Match session inputs and outputs by name; Memcpy nodes by tensor, then cause, then size."""
    gone, came = list(before.copies), list(after.copies)
    roles: tuple[tuple[Callable[[Copy], Hashable], Callable[[Copy], Hashable]], ...] = (
        (_tensor_role, _tensor_role),
        (_cause_role(before), _cause_role(after)),
        (_size_role, _size_role),
    )
    both: list[tuple[Copy, Copy]] = []
    for ours, theirs in roles:
        groups, others = _by_role(gone, ours), _by_role(came, theirs)
        # Counts may differ: of three copies of a tensor, two may remain.
        pairs = [pair for key in groups for pair in zip(groups[key], others.get(key, ()), strict=False)]
        both += pairs
        taken = {id(copy) for pair in pairs for copy in pair}
        gone = [copy for copy in gone if id(copy) not in taken]
        came = [copy for copy in came if id(copy) not in taken]
    return CopyPairs(tuple(both), tuple(gone), tuple(came))


def _tensor_role(copy: Copy) -> Hashable:
    """Tensor and direction of a copy."""
    if copy.kind != "memcpy_node":
        return (copy.kind, copy.name)
    return None if copy.tensor is None else (copy.direction, copy.tensor)


def _cause_role(phase: Phase) -> Callable[[Copy], Hashable]:
    """File nodes that a Memcpy node copies for."""
    behind = {name: [row.name for row in rows] for name, rows in ran_by(phase).items()}

    def role(copy: Copy) -> Hashable:
        names = frozenset(name for cause in copy.caused_by for name in behind.get(cause, (cause,)))
        return (copy.direction, names) if copy.kind == "memcpy_node" and names else None

    return role


def _size_role(copy: Copy) -> Hashable:
    """Size of a copy with unknown tensor and cause."""
    unnamed = copy.kind == "memcpy_node" and not copy.tensor and not copy.caused_by
    return (copy.direction, copy.bytes_per_run) if unnamed else None
