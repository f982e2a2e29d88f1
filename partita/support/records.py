"""The support table of a provider, as `partita support --json` prints it.

Schema `partita.support/1`; the JSON Schema is published in docs/support.schema.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from partita.observations.records import Record

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
class Measurements:
    """Results of a measurement."""

    results: tuple[Measurement, ...]
    model_nodes: tuple[ModelNeed, ...]
    """Nodes of the model, with types in the spelling of ONNX schemas; empty without a model."""
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


SCHEMA = "partita.support/1"
SupportLevel = Literal["supported", "partly", "rejected", "invalid", "untested"]
"""supported: every valid tested variant is supported; partly: some; rejected: none; invalid: no tested variant is a
valid model; untested: nothing was tested."""


class ProviderFacts(Record):
    """The tested provider and its device."""

    name: str
    ort_name: str
    plugin: str | None
    """Library of a plugin provider; null for a built-in provider."""
    options: dict[str, str]
    device: str | None
    """GPU that a dry run simulated; null for a real device."""
    devices: tuple[str, ...]
    """Descriptions of its devices."""


class Versions(Record):
    """Versions that outcomes may depend on."""

    onnxruntime: str
    onnxruntime_package: str
    """Wheels of ONNX Runtime and of the tested provider's plugin, with their versions."""
    onnxruntime_build: str
    onnx: str
    """Version of the onnx package whose schemas define the tested operators."""
    opset: int | None
    """Newest version of ai.onnx that this ONNX Runtime opens."""
    cpu: str
    operating_system: str


class Assignments(Record):
    """Type assignments, one type per variable, by outcome."""

    variables: tuple[str, ...]
    """Type variables of the operator's schema."""
    supported: tuple[tuple[str, ...], ...] = ()
    replaced: tuple[tuple[str, ...], ...] = ()
    """Assignments of `supported` for which ONNX Runtime replaced the operator by the nodes of its function or by a
    constant."""
    rejected: tuple[tuple[str, ...], ...] = ()
    failed: tuple[tuple[str, ...], ...] = ()
    crashed: tuple[tuple[str, ...], ...] = ()
    invalid: tuple[tuple[str, ...], ...] = ()
    untested: tuple[tuple[str, ...], ...] = ()
    beyond_limit: int = 0
    """Number of untested assignments beyond the limit."""


class FormEntry(Record):
    """One form of an operator: attributes, optional inputs, constant inputs, ranks."""

    kind: Kind
    outcome: Outcome
    difference: str
    """Difference from the example; empty for an example."""
    factors: tuple[str, ...]
    message: str


class Condition(Record):
    """A property of unsupported forms that no supported form has."""

    factors: tuple[str, ...]
    """Candidates for the property; several if the tested forms do not separate them."""
    forms: int
    """Number of forms with the property."""


class Message(Record):
    """A message of the provider or ONNX Runtime about unsupported variants (invalid variants if all are invalid)."""

    text: str
    variants: int


class VersionEntry(Record):
    """Support of one operator version."""

    since: int
    """Operator set version that introduced it."""
    until: int | None
    """Last operator set version with it; null for the current version."""
    verdict: SupportLevel
    types: Assignments
    forms: tuple[FormEntry, ...]
    conditions: tuple[Condition, ...]
    """Conditions under which forms are unsupported, if other forms are supported."""
    unexplained: int
    """Unsupported forms without a property that separates them from supported forms."""
    messages: tuple[Message, ...]


class OperatorEntry(Record):
    """All tested versions of an operator, oldest first."""

    domain: str
    name: str
    versions: tuple[VersionEntry, ...]

    @property
    def newest(self) -> VersionEntry:
        """The version in the newest operator set."""
        return self.versions[-1]

    @property
    def full_name(self) -> str:
        """Operator name, with the domain unless it is ai.onnx."""
        return f"{self.domain}:{self.name}" if self.domain else self.name


class ModelNeed(Record):
    """Nodes of the model with one operator and equal types."""

    domain: str
    operator: str
    since: int
    types: dict[str, str]
    """Type variable -> type, as far as known."""
    nodes: int
    outcome: Outcome = "untested"


class SupportTable(Record):
    """Measured operator support of a provider; schema `partita.support/1`."""

    schema_id: Literal["partita.support/1"] = Field(default="partita.support/1", alias="schema")
    created: str
    partita_version: str
    provider: ProviderFacts
    versions: Versions
    scope: str
    """Scope of the measurement: all, operators, or a file."""
    seconds: float
    budget_seconds: float
    complete: bool
    """Every variant in scope was tested."""
    sessions: int
    crashes: int
    variants: dict[Outcome, int]
    """Number of variants by outcome."""
    operators: tuple[OperatorEntry, ...]
    model_operators: tuple[ModelNeed, ...]
    """Nodes of the model by operator and types; empty without a model."""
    without_example: tuple[str, ...]
    """Operator versions without a known valid form, which could not be tested."""
    notes: tuple[str, ...] = ()
