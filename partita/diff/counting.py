"""Number of nodes in changes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from partita.diff.records import NodeChange, ReasonChange


def count_nodes(changes: Iterable[NodeChange | ReasonChange]) -> int:
    """Distinct nodes of the model: a node in several phases counts once; equal names in one phase (nodes of a function)
    count separately.
    """
    by_phase: dict[str, Counter[str]] = {}
    for change in changes:
        by_phase.setdefault(change.phase, Counter())[change.node] += 1
    most: Counter[str] = Counter()
    for counted in by_phase.values():
        most |= counted
    return most.total()
