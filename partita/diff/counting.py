"""How many nodes changes are about. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from partita.diff.records import NodeChange, ReasonChange


def count_nodes(changes: Iterable[NodeChange | ReasonChange]) -> int:
    """Nodes of a model: one that is different in several phases counts once, and those of one name (of a function,
    whose nodes a report knows by its call) as often as a phase has them.
    """
    by_phase: dict[str, Counter[str]] = {}
    for change in changes:
        by_phase.setdefault(change.phase, Counter())[change.node] += 1
    most: Counter[str] = Counter()
    for counted in by_phase.values():
        most |= counted
    return most.total()
