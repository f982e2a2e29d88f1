"""Measured outcomes for variants of operators, input of the support table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["supported", "rejected", "failed", "crashed", "invalid", "untested"]
"""supported: on the provider. rejected: on another provider. failed: on the provider, but the session cannot be opened.
crashed: the process ended or hung. invalid: not a valid model. untested: the time ran out.
"""
Kind = Literal["types", "form", "constants", "rank"]
"""Property that a variant tests."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One variant and its outcome."""

    domain: str
    operator: str
    since: int
    until: int | None
    kind: Kind
    types: tuple[tuple[str, str], ...]
    """(type variable, type) in the spelling of ONNX schemas."""
    difference: str
    """Difference of the form from the example; empty for the example."""
    factors: frozenset[str]
    """Properties of the form that may decide the outcome."""
    outcome: Outcome
    message: str = ""
    """Message of the provider or ONNX Runtime."""
    replaced: bool = False
    """ONNX Runtime replaced or removed the node, and the provider supports the result."""


@dataclass(frozen=True, slots=True)
class ModelNodes:
    """Nodes of a model with one operator version and types."""

    domain: str
    operator: str
    since: int
    types: tuple[tuple[str, str], ...]
    nodes: int


@dataclass(frozen=True, slots=True)
class Measurements:
    """Results of a measurement."""

    results: tuple[Measurement, ...]
    model_nodes: tuple[ModelNodes, ...]
    """Nodes of the model; empty without a model."""
    without_example: tuple[str, ...]
    """Operator versions without a known valid form."""
    untested_counts: tuple[tuple[tuple[str, str, int], int], ...]
    """(domain, operator, version) and its number of untested type assignments beyond the limit."""
    newest_opset: int | None
    """Newest version of ai.onnx that ONNX Runtime opens; None if nothing could be tested."""
    sessions: int
    crashes: int
    seconds: float
    complete: bool
    """Every variant was tested within the budget."""
    interrupted: bool = False
    unusable: str = ""
    """Why the provider could not be tested."""
