"""What a factor of the experiments is: one thing about a node that is tried otherwise, everything else as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from partita.runtime.probes.cases import Case
from partita.runtime.probes.ideas import Idea

Vary = Callable[[Case], Iterator[Idea]]
"""Every way in which a case can be otherwise, likeliest to be taken first; what is not legal is tried in vain."""


@dataclass(frozen=True, slots=True)
class Part:
    """How a factor is combined with others."""

    place: int
    """Changes of a lower place are made first, and named first."""
    vary: Vary


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing about a node. Which reason it shows is said by the reason, in its `factors`."""

    name: str
    """That of its file, and of the factor of its trials in a report."""
    kind: str
    """What its variations are, in words, for a list of what was tried: `other types`."""
    rank: int
    """Factors of a lower rank are tried first."""
    vary: Vary
    part: Part | None = None
    """None: it is tried by itself alone."""
