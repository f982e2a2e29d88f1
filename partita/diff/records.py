"""Differences between two reports, as `report diff --json` prints them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import PhaseName, Record


class Side(Record):
    """One of the two reports."""

    name: str
    """File name."""
    created: str
    what: str
    """Package or model, and command."""
    onnxruntime: str
    chain: tuple[str, ...]
    failed: str | None = None
    """Why its run failed; null if it did not."""


class Change(Record):
    """A changed version, option or state of the run."""

    subject: Literal["environment", "package", "model", "request", "chain", "cache", "dry_run", "checks"]
    key: str
    """Stable identifier."""
    name: str
    """Displayed name."""
    before: str | None
    """null: there was none."""
    after: str | None
    cache_moved: bool = False
    """Whether the cache stays in place has changed; changes of its memory do not count."""


class NodeChange(Record):
    """A moved, added or removed node."""

    phase: PhaseName
    node: str
    name_before: str | None = None
    """Its name in the first report, if different."""
    op_type: str | None
    """Its operator; inferred from its name if it is only part of a compiled or fused node."""
    module: str | None
    before: str | None
    """Provider in the first report; null if the node is missing there or its provider is unknown."""
    after: str | None
    runs_in: str | None = None
    """The compiled or fused node that contains it in the second report (in the first, if it was removed)."""
    reason: str | None = None
    """Why it is not on its former provider, or else on the first available preferred provider; null if it is on the
    preferred provider."""
    evidence: str = ""
    remedy: str = ""


class Refusion(Record):
    """A node that is now part of another compiled or fused node on the same provider."""

    phase: PhaseName
    node: str
    before: str
    """Operator of the plan node that contained it."""
    after: str


class ReasonChange(Record):
    """A new, removed or changed reason of a fallback."""

    phase: PhaseName
    node: str
    change: Literal["new", "gone", "changed"]
    before: str | None
    after: str | None
    provider: str
    """Provider of the node; its former provider for a removed reason."""
    moved: bool
    """The node also moved."""
    skipped: str = ""
    """The skipped provider, if it is not the first of the chain."""
    evidence_kind: str
    evidence: str
    remedy: str


class CopyChange(Record):
    """A new, removed or resized copy between devices."""

    phase: PhaseName
    change: Literal["new", "gone", "changed"]
    kind: Literal["memcpy_node", "session_input", "session_output"]
    direction: str
    what: str
    """Tensor name, else the name of the copy."""
    bytes_before: int | None
    bytes_after: int | None
    caused_by: tuple[str, ...]


class Figure(Record):
    """One figure of a phase in both reports."""

    phase: PhaseName
    name: Literal[
        "nodes",
        "added",
        "partitions",
        "copies",
        "copy_bytes_per_run",
        "copy_bytes_per_token",
        "host_wait_us_per_token",
        "tokens_per_second",
        "step_p50_ms",
    ]
    before: float | None
    after: float | None
    ratio: float | None
    """`after` divided by `before`; null if one is unknown or `before` is 0."""
    spread: Literal["counted", "within", "beyond", "unknown"]
    """For times: whether the difference is within the spread of step times; variation between runs is not covered."""


class ReportDiff(Record):
    """Differences between two reports."""

    schema_id: Literal["partita.diff/1"] = Field(default="partita.diff/1", alias="schema")
    headline: str
    before: Side
    after: Side
    unrelated: str
    """Why the reports are not of the same model; empty if they are."""
    same: bool
    """Nodes, reasons and copies are equal; versions and times are ignored."""
    changes: tuple[Change, ...]
    moved: tuple[NodeChange, ...]
    came: tuple[NodeChange, ...]
    gone: tuple[NodeChange, ...]
    renamed: tuple[NodeChange, ...]
    """Matched although the trailing number of the name differs."""
    fused_otherwise: tuple[Refusion, ...]
    reasons: tuple[ReasonChange, ...]
    copies: tuple[CopyChange, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
