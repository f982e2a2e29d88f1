"""Finds the smallest parts of a graph that a provider does not open, by opening ever smaller parts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from partita.observations.facts import FAILED, RejectedPart
from partita.runtime.lab.graph import CannotProbeError, Graph
from partita.runtime.lab.laboratory import BUDGET, Lab
from partita.runtime.lab.variant import part_model

MOST_PARTS = 5
"""Maximum number of culprits per graph."""
MORE_SECONDS = 15.0
"""Seconds after which no further culprit is searched for; in a large graph, compilers need half a minute for one."""
FEW_TRIES = 16
"""A search with fewer experiments was in a small graph, so its duration is ignored."""


class OutOfTimeError(Exception):
    """The time budget is exhausted."""


@dataclass(slots=True)
class Search:
    """One bisection and its results so far."""

    graph: Graph
    lab: Lab
    attempts: int = 0
    failed: dict[tuple[str, ...], tuple[str, bool]] = field(default_factory=dict)
    """Error message of each part that failed, and whether a Neg was added to it."""
    untested: str = ""
    """Why the first untested part could not be tested; empty if all could."""

    def fails(self, part: tuple[str, ...]) -> bool:
        """Whether the provider fails to open this part. Raises OutOfTimeError."""
        if part in self.failed:
            return True
        try:
            model = part_model(self.graph, part, auxiliary=self.lab.compiles)
        except CannotProbeError as error:
            self.untested = self.untested or str(error)
            return False
        (answer,) = self.lab.try_all([model], one_node=False)
        if answer is None:
            self.untested = self.lab.unusable or BUDGET
            raise OutOfTimeError
        self.attempts += 1
        if answer.outcome == "invalid":
            self.untested = self.untested or f"ONNX Runtime does not accept this model ({answer.message})"
        if answer.outcome in FAILED:
            self.failed[part] = answer.message, len(model.graph.node) > len(part)
        return answer.outcome in FAILED


def find_rejected(search: Search) -> RejectedPart | None:
    """The smallest rejected part, with others that are rejected without it; None if the graph opens or is untested."""
    left = tuple(node.name for node in search.graph.proto.graph.node)
    found: list[RejectedPart] = []
    opens, began = False, time.monotonic()
    while len(found) < MOST_PARTS and left:
        tries = search.attempts
        part = _smallest_in(search, left)
        if part is None:
            opens = bool(found) and not search.untested and search.attempts > tries
            break
        found.append(part)
        if not part.minimal or (part.attempts > FEW_TRIES and time.monotonic() - began > MORE_SECONDS):
            break
        left = tuple(name for name in left if name not in part.nodes)
    return replace(found[0], other_parts=tuple(found[1:]), rest_opens=opens) if found else None


def _smallest_in(search: Search, names: tuple[str, ...]) -> RejectedPart | None:
    """The smallest rejected part of these nodes; None if it opens or cannot be tested."""
    search.failed, search.untested, tries = {}, "", search.attempts
    try:
        if not search.fails(names):
            return None
        best, minimal = _minimal(search, names), True
    except OutOfTimeError:
        if not search.failed:
            return None
        best, minimal = min(search.failed, key=len), False
    message, neg_added = search.failed[best]
    attempts = search.attempts - tries
    return RejectedPart(best, message, minimal, attempts, neg_added=neg_added, untested=search.untested)


def _minimal(search: Search, names: tuple[str, ...]) -> tuple[str, ...]:
    """`names` without all nodes that can be removed while the rest still fails, in ever smaller pieces."""
    size = len(names) // 2
    while size:
        for start in reversed(range(0, len(names), size)):
            kept = names[:start] + names[start + size :]
            if kept and search.fails(kept):
                names, size = kept, min(2 * size, len(kept))
                break
        size //= 2
    return names
