"""Finds the smallest part of a graph that a provider does not open, by opening ever smaller parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from partita.observations.facts import FAILED, RejectedPart
from partita.runtime.lab.graph import CannotProbeError, Graph
from partita.runtime.lab.laboratory import BUDGET, Lab
from partita.runtime.lab.variant import part_model


class OutOfTimeError(Exception):
    """The time budget is exhausted."""


@dataclass(slots=True)
class Search:
    """One bisection and its results so far."""

    graph: Graph
    lab: Lab
    attempts: int = 0
    messages: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Error message of each part that failed."""
    with_auxiliary: set[tuple[str, ...]] = field(default_factory=set)
    """Failed parts to which a Neg was added."""
    untested: str = ""
    """Why the first untested part could not be tested; empty if all could."""

    def fails(self, names: Sequence[str]) -> bool:
        """Whether the provider fails to open this part. Raises OutOfTimeError."""
        part = tuple(names)
        if not part:
            return False
        if part in self.messages:
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
            self.messages[part] = answer.message
            if len(model.graph.node) > len(part):
                self.with_auxiliary.add(part)
        return answer.outcome in FAILED


MOST_PARTS = 5
"""Maximum number of culprits per graph."""
MORE_SECONDS = 15.0
"""Seconds after which no further culprit is searched for; in a large graph, compilers need half a minute for one."""
FEW_TRIES = 16
"""A search with fewer experiments was in a small graph, so its duration is ignored."""


def find_rejected(search: Search) -> RejectedPart | None:
    """The smallest rejected part, with others that are rejected without it; None if the graph opens or is untested."""
    left = tuple(node.name for node in search.graph.proto.graph.node)
    found: list[RejectedPart] = []
    opens, began = False, time.monotonic()
    while len(found) < MOST_PARTS and left:
        tries = search.attempts
        search.messages, search.untested = {}, ""
        part = _smallest_in(search, left)
        if part is None:
            opens = bool(found) and not search.untested and search.attempts > tries
            break
        found.append(replace(part, attempts=search.attempts - tries))
        if not part.minimal or (search.attempts - tries > FEW_TRIES and time.monotonic() - began > MORE_SECONDS):
            break
        left = tuple(name for name in left if name not in part.nodes)
    if not found:
        return None
    return replace(found[0], other_parts=tuple(found[1:]), rest_opens=opens)


def _smallest_in(search: Search, best: tuple[str, ...]) -> RejectedPart | None:
    """The smallest rejected part of `best`; None if it opens or cannot be tested."""
    minimal = False
    try:
        if not search.fails(best):
            return None
        beginning = best
        end = _shortest(search, len(beginning), lambda length: beginning[:length])
        best = _shortest(search, len(end), lambda length: end[len(end) - length :])
        best = _minimal_without(search, best)
        minimal = True
    except OutOfTimeError:
        if not search.messages:
            return None
        best = min(search.messages, key=len)
    company = best in search.with_auxiliary
    return RejectedPart(
        best, search.messages[best], minimal, search.attempts, neg_added=company, untested=search.untested
    )


def _shortest(search: Search, length: int, part: Callable[[int], tuple[str, ...]]) -> tuple[str, ...]:
    """The shortest `part(length)` that fails, given that the full length does."""
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        if search.fails(part(middle)):
            high = middle
        else:
            low = middle
    return part(high)


def _minimal_without(search: Search, names: tuple[str, ...]) -> tuple[str, ...]:
    """`names` without all nodes that can be removed while the rest still fails, removed in ever smaller pieces."""
    size = max(len(names) // 2, 1)
    while len(names) > 1:
        for start in range(0, len(names), size):
            kept = names[:start] + names[start + size :]
            if kept and search.fails(kept):
                names = kept
                break
        else:
            if size == 1:
                break
            size = max(size // 2, 1)
            continue
        size = min(size, max(len(names) // 2, 1))
    return names
