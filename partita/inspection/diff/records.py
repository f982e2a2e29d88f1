"""What is different between what two packages or folders hold.

Schema `partita.inspection-diff/1`; the JSON Schema is published in docs/inspect-diff.schema.json.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Record

Subject = Literal[
    "model",
    "contract",
    "graph",
    "operators",
    "inputs and outputs",
    "states",
    "weights",
    "modules",
    "provenance",
    "adapters",
    "files",
    "tokenizer and licence",
    "findings",
]
"""What a difference is about."""


class InspectedSide(Record):
    """One of the two."""

    path: str
    what: str
    """The sentence that its own inspection begins with."""
    created: str | None


class Difference(Record):
    """One fact that is not the same in both."""

    subject: Subject
    name: str
    before: str | None
    """null: only the second has it."""
    after: str | None
    """null: only the first has it."""


class InspectionDiff(Record):
    """What is different in the second of two packages or folders."""

    schema_id: Literal["partita.inspection-diff/1"] = Field(default="partita.inspection-diff/1", alias="schema")
    headline: str
    before: InspectedSide
    after: InspectedSide
    differences: tuple[Difference, ...]
    same: int
    """Facts that both have alike."""
