"""One thing that could be changed about a node, and the variation of a case that comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from partita.observations.facts import COMBINED, Factor, Swap
from partita.runtime.probes.cases import Case
from partita.runtime.probes.variants import Change, vary


@dataclass(frozen=True, slots=True)
class Variation:
    """A node as it could be instead."""

    factor: Factor
    change: str
    """In words."""
    case: Case
    parts: tuple[Factor, ...] = ()
    """Of a combined one."""
    swap: Swap | None = None
    """The change, where one thing takes the place of another."""
    removes: bool = False
    """The change leaves something out."""

    def then(self, ideas: Iterable[Idea]) -> Iterator[Variation]:
        """This variation with one thing more, for each idea; the case has both."""
        for after in made(self.case, ideas):
            change = " and ".join(part for part in (self.change, after.change) if part)
            removes = self.removes if self.change else after.removes
            parts = after.parts or (after.factor,)
            yield Variation(COMBINED, change, after.case, (*self.parts, *parts), removes=removes)


@dataclass(frozen=True, slots=True)
class Idea:
    """One thing that could be changed about a node."""

    factor: Factor
    change: Change
    words: str = ""
    swap: Swap | None = None
    """In place of words."""
    removes: bool = False
    parts: tuple[Factor, ...] = ()
    """When it counts as several changes."""

    def of(self, case: Case) -> Variation | None:
        """The variation of a case; None when that would be the case itself, or is not possible."""
        varied = vary(case, self.change)
        if varied is None or varied == case:
            return None
        words = str(self.swap) if self.swap is not None else f"without {self.words}" if self.removes else self.words
        return Variation(self.factor, words, varied, self.parts, self.swap, self.removes)


def made(case: Case, ideas: Iterable[Idea]) -> Iterator[Variation]:
    """The variations that come of ideas."""
    return (variation for idea in ideas if (variation := idea.of(case)) is not None)
