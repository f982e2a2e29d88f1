"""Differences between the contents of two packages or folders.

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
"""Subject of a difference."""


class InspectedSide(Record):
    """One of the two packages or folders."""

    path: str
    what: str
    """Headline of its inspection."""
    created: str | None


class Difference(Record):
    """One fact that differs."""

    subject: Subject
    name: str
    before: str | None
    """null: only in the second."""
    after: str | None
    """null: only in the first."""


class InspectionDiff(Record):
    """Differences of the second package or folder from the first."""

    schema_id: Literal["partita.inspection-diff/1"] = Field(default="partita.inspection-diff/1", alias="schema")
    headline: str
    before: InspectedSide
    after: InspectedSide
    differences: tuple[Difference, ...]
    same: int
    """Number of identical facts."""
