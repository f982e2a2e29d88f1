"""The support table of a provider, as `partita support --json` prints it: frozen and versioned.

Schema `partita.support/1`; the JSON Schema is published in docs/support.schema.json. Everything in it was measured on
the installed ONNX Runtime; what was not tried is named.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Record
from partita.support.answers import Kind, Outcome

SCHEMA = "partita.support/1"
Verdict = Literal["taken", "partly", "left", "invalid", "untried"]
"""taken: whatever was tried and is a valid model; partly: some of it; left: none of it; invalid: nothing that was tried
is a valid model; untried: nothing was tried."""


class ProviderFacts(Record):
    """The provider that was tested, and on which device."""

    name: str
    ort_name: str
    plugin: str | None
    """Library of a plugin provider; null when ONNX Runtime contains it."""
    options: dict[str, str]
    device: str | None
    """The GPU that a dry run simulated; null when the provider ran on this machine's own."""
    devices: tuple[str, ...]
    """Devices that it offers, in words."""


class Versions(Record):
    """Of everything that an answer may depend on."""

    onnxruntime: str
    onnxruntime_package: str
    onnxruntime_build: str
    onnx: str
    """Of the package whose schemas say what there is to be asked."""
    opset: int | None
    """The newest version of ONNX's operator set that this ONNX Runtime opens."""
    cpu: str
    operating_system: str


class Assignments(Record):
    """Types, one for each variable, by what became of them."""

    variables: tuple[str, ...]
    """Type variables of the operator's schema."""
    taken: tuple[tuple[str, ...], ...] = ()
    replaced: tuple[tuple[str, ...], ...] = ()
    """Those of `taken` that are not there as themselves: ONNX Runtime has put the nodes of the operator's function in
    its place, or a constant."""
    left: tuple[tuple[str, ...], ...] = ()
    failed: tuple[tuple[str, ...], ...] = ()
    crashed: tuple[tuple[str, ...], ...] = ()
    invalid: tuple[tuple[str, ...], ...] = ()
    untried: tuple[tuple[str, ...], ...] = ()
    not_asked: int = 0
    """So many more there are, which were not asked about."""


class FormEntry(Record):
    """One way to write an operator: attributes, which inputs there are, which of them are constants, ranks."""

    kind: Kind
    outcome: Outcome
    what: str
    """What is other than in the example; empty for an example."""
    factors: tuple[str, ...]
    said: str


class Condition(Record):
    """What all forms that are not taken have in common, and none that is taken."""

    factors: tuple[str, ...]
    """One of these decides; with more than one, what was tried does not tell them apart."""
    forms: int
    """So many forms have it."""


class Said(Record):
    """What the provider or ONNX Runtime said of variants that are not taken; where none is a valid model, of those."""

    text: str
    variants: int


class VersionEntry(Record):
    """What the provider takes of one version of an operator."""

    since: int
    """The version of the operator set that it came with."""
    until: int | None
    """The last in which it is in force; null while nothing has replaced it."""
    verdict: Verdict
    types: Assignments
    forms: tuple[FormEntry, ...]
    conditions: tuple[Condition, ...]
    """Of forms that are not taken, where others are."""
    unexplained: int
    """Forms that are not taken and have nothing that would tell them from those that are."""
    said: tuple[Said, ...]


class OperatorEntry(Record):
    """All versions of an operator that were asked about, oldest first."""

    domain: str
    name: str
    versions: tuple[VersionEntry, ...]

    @property
    def newest(self) -> VersionEntry:
        """The version that the newest operator set has."""
        return self.versions[-1]

    @property
    def full_name(self) -> str:
        """With the domain, where it is not ONNX's own."""
        return f"{self.domain}:{self.name}" if self.domain else self.name


class ModelNeed(Record):
    """Nodes of the model with one operator in the same types."""

    domain: str
    operator: str
    since: int
    types: dict[str, str]
    """By type variable, as far as they are known."""
    nodes: int
    outcome: Outcome


class Counts(Record):
    """Of variants, by what became of them."""

    taken: int
    left: int
    failed: int
    crashed: int
    invalid: int
    untried: int


class SupportTable(Record):
    """Which operators a provider supports, as measured; the record behind `partita.support/1`."""

    schema_id: Literal["partita.support/1"] = Field(default="partita.support/1", alias="schema")
    created: str
    partita_version: str
    provider: ProviderFacts
    versions: Versions
    asked: str
    """What was asked about: all, operators, or a file."""
    seconds: float
    budget_seconds: float
    complete: bool
    """Everything that was to be asked was asked."""
    sessions: int
    crashes: int
    variants: Counts
    operators: tuple[OperatorEntry, ...]
    model: tuple[ModelNeed, ...]
    """What the model needs; empty when none was given."""
    without_example: tuple[str, ...]
    """Versions of operators of which no legal form is known here, so that they could not be asked about."""
    notes: tuple[str, ...]
