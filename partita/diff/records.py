"""What is different between two reports, as `report diff --json` prints it: frozen, every number with its unit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import PhaseName, Record


class Side(Record):
    """One of the two reports."""

    name: str
    """What the user called it: the file."""
    created: str
    what: str
    """Package or model, and verb."""
    onnxruntime: str
    chain: tuple[str, ...]
    failed: str | None = None
    """Why its run failed; null when it did not."""


class Change(Record):
    """A version, an option or a state of the run that is another one now."""

    subject: Literal["environment", "package", "model", "request", "chain", "cache", "dry_run", "checks"]
    key: str
    """What it is, for programs; stays as it is when `name` is said otherwise."""
    name: str
    """For people."""
    before: str | None
    """Null where there was none."""
    after: str | None
    cache_moved: bool = False
    """The cache no longer stays in place, or does now; that it is elsewhere or was not looked at is no such change."""


class NodeChange(Record):
    """A node of the file, or one that ONNX Runtime added, that is elsewhere, new or gone."""

    phase: PhaseName
    node: str
    name_before: str | None = None
    """Its name in the first report, where that is another."""
    op_type: str | None
    """Its own; where it only ran inside a compiled or fused node, the one that it is named for."""
    module: str | None
    before: str | None
    """Provider in the first report; null when the node was not there, or nobody said where."""
    after: str | None
    runs_in: str | None = None
    """The compiled or fused node that does its work in the second report (in the first one, when it is gone)."""
    reason: str | None = None
    """Why it is not on the provider that it left in the second report, or on the first preferred one that is there;
    null when nothing was preferred to where it is."""
    evidence: str = ""
    remedy: str = ""


class Refusion(Record):
    """A node of the file that is now part of another compiled or fused node, on the same provider."""

    phase: PhaseName
    node: str
    before: str
    """The operator of the node of the plan that did its work."""
    after: str


class ReasonChange(Record):
    """A node that is off a preferred provider for a new reason, no longer, or for another reason."""

    phase: PhaseName
    node: str
    change: Literal["new", "gone", "changed"]
    before: str | None
    after: str | None
    provider: str
    """Where the node is; where it was, when the reason is gone."""
    moved: bool
    """The node is also among those that moved."""
    skipped: str = ""
    """The preferred provider that the reasons are about, where it is not the one wanted most."""
    evidence_kind: str
    evidence: str
    remedy: str


class CopyChange(Record):
    """A copy between devices that is new, gone, or of another size."""

    phase: PhaseName
    change: Literal["new", "gone", "changed"]
    kind: Literal["memcpy_node", "session_input", "session_output"]
    direction: str
    what: str
    """The tensor, else the name of the copy."""
    bytes_before: int | None
    bytes_after: int | None
    caused_by: tuple[str, ...]


class Figure(Record):
    """One figure of a phase in both reports."""

    phase: PhaseName
    name: Literal[
        "nodes",
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
    """`after` divided by `before`; null where one is unknown or `before` is 0."""
    spread: Literal["counted", "within", "beyond", "unknown"]
    """For a time: whether the spread of the steps within the runs explains the difference. It says nothing about how
    much two runs of the same thing differ."""


class ReportDiff(Record):
    """Everything that is different between two reports."""

    schema_id: Literal["partita.diff/1"] = Field(default="partita.diff/1", alias="schema")
    headline: str
    before: Side
    after: Side
    unrelated: str
    """Why the reports are not of one model; empty when they are."""
    same: bool
    """Nodes, reasons and copies are the same; versions and times are not looked at."""
    changes: tuple[Change, ...]
    moved: tuple[NodeChange, ...]
    came: tuple[NodeChange, ...]
    gone: tuple[NodeChange, ...]
    renamed: tuple[NodeChange, ...]
    """Matched although the exporter's number at the end of the name is another."""
    fused_otherwise: tuple[Refusion, ...]
    reasons: tuple[ReasonChange, ...]
    copies: tuple[CopyChange, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
