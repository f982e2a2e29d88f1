"""What a run on a cluster was: every worker, what it ran on, and what it did. Schema `partita.cluster/1`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Record


class PhasePlacement(Record):
    """Where the nodes of a phase ran on a worker."""

    phase: str
    file: str
    nodes: dict[str, int]
    """Nodes by provider."""
    copies: int
    """Memcpy nodes."""


class WorkerFact(Record):
    """One worker."""

    worker: str
    """Ray's id of its actor."""
    host: str
    node: str
    """Ray's id of its node."""
    pid: int
    python: str
    """Interpreter and version."""
    onnxruntime: str
    """Version and wheel."""
    chain: tuple[str, ...]
    """Providers that are used, in order."""
    slots: int
    """Rows of its batch."""
    load_seconds: float
    placement: tuple[PhasePlacement, ...]
    blocks: int = 0
    rows: int = 0
    """Answered, those that had to be given again included."""
    tokens: int = 0
    """New ones."""
    busy_seconds: float = 0.0
    """From its first block to the end of its last."""
    tokens_per_second: float | None = None
    """None where it did nothing."""


class ClusterReport(Record):
    """A run on a cluster."""

    schema_: Literal["partita.cluster/1"] = Field(default="partita.cluster/1", alias="schema")
    address: str
    ray: str
    nodes: int
    rows: int
    """Answered in this run."""
    again: int
    """Answered a second time, because a worker was lost before its block was whole; the first answer counts."""
    tokens: int
    """New ones of the rows that count."""
    seconds: float
    """From the first block to the last answer, the start of the workers included."""
    tokens_per_second: float | None
    least: int
    """Workers that were asked for at least; as many as `wanted` where their number is fixed."""
    wanted: int
    """Workers that were asked for at most; more than these have been where some were lost."""
    workers: tuple[WorkerFact, ...]
