"""What was asked about one variant of an operator, and what came of it: facts, as the measurement hands them over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["taken", "left", "failed", "crashed", "invalid", "untried"]
"""taken: the provider has the node; left: it leaves it to others; failed: it claims it, and the session cannot be
opened; crashed: its process ends or hangs over it; invalid: not a valid model, which says nothing of the provider;
untried: the time was up.
"""
Kind = Literal["types", "form", "constants", "rank"]
"""What a variant is asked for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One variant and what came of it."""

    domain: str
    operator: str
    since: int
    until: int | None
    kind: Kind
    types: tuple[tuple[str, str], ...]
    """(type variable, type) as schemas spell them."""
    what: str
    """What the form has that the example has not, in words; empty for the example."""
    factors: frozenset[str]
    """What might decide over the form."""
    outcome: Outcome
    said: str = ""
    """What the provider or ONNX Runtime said."""
    replaced: bool = False
    """ONNX Runtime has put something else in its place, or nothing, and the provider takes that."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a model has: a version of an operator in certain types, and in how many nodes."""

    domain: str
    operator: str
    since: int
    types: tuple[tuple[str, str], ...]
    nodes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that a measurement found out."""

    answers: tuple[Answer, ...]
    needs: tuple[Need, ...]
    """Of a model; empty when none was given."""
    without_example: tuple[str, ...]
    """Versions of operators that nothing is known to be a legal form of."""
    beyond: tuple[tuple[tuple[str, str, int], int], ...]
    """Assignments of types that were too many to be asked about, by version of an operator."""
    newest_opset: int | None
    """Of ONNX's operator set, that ONNX Runtime opens; None when nothing could be asked."""
    sessions: int
    crashes: int
    seconds: float
    complete: bool
    """Everything was asked within the budget."""
    interrupted: bool = False
    unusable: str = ""
    """Why the provider could not be asked at all."""
