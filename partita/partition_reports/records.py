"""The partition report as written to disk; names of numbers include their unit.

Schema `partita.report/1`; the JSON Schema is published in docs/report.schema.json. Unknown values are null.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.diagnosis.records import Fallback, KernelPath
from partita.observations.codes import Interruption
from partita.observations.records import (
    ChainEntry,
    CpuSession,
    Environment,
    Memory,
    PackageFacts,
    PhaseName,
    Probing,
    Record,
    Source,
)
from partita.partition_reports.request_records import DryRunFacts, ModelFacts, Request, Speculation

SCHEMA = "partita.report/1"


NodeState = Literal["executed", "ambiguous", "folded"]


class FileNode(Record):
    """One node of the ONNX file, the unit of every count and share."""

    name: str
    op_type: str | None
    """null if the file is unknown."""
    module: str | None
    layer: int | None
    provider: str | None
    """The least preferred provider of the nodes in `ran_as`; null if a provider is unknown, and for a folded node."""
    ran_as: tuple[str, ...]
    """Executed nodes that ran it: itself, a fused or compiled node, or the nodes of its function. If `state` is
    ambiguous: nodes that may have run it. Empty for a folded node."""
    state: NodeState
    """folded: ONNX Runtime computed or removed it at load time. ambiguous: the node that executes it is unknown."""


class NodePlacement(Record):
    """One executed node, in the final plan, with its provider."""

    position: int
    """0-based position in the execution order."""
    name: str
    op_type: str | None
    provider: str | None
    """null if no source names it; `conflicts` has an entry then."""
    module: str | None
    layer: int | None
    """Layer of its module; for a Memcpy node that of the node that requires it, for a compiled node that of its first
    part."""
    host_us_per_run: float | None
    """Median host time over the observed runs of this phase."""
    output_bytes: int | None
    """Output bytes in the last observed run of this phase."""
    replaces: tuple[str, ...]
    """File nodes that a compiled or fused node runs, from the optimised graph or its name."""
    added: bool = False
    """Whether ONNX Runtime added it, such as a Memcpy node: no row of `file_nodes` ran as it."""
    sources: tuple[Source, ...]


class ProviderShare(Record):
    """Share of one provider in one phase."""

    provider: str
    nodes: int
    """File nodes."""
    added_nodes: int
    """Nodes that ONNX Runtime added."""
    executed_nodes: int
    """Nodes of the final plan."""
    op_types: dict[str, int]
    """Operators of the file nodes."""
    host_us_per_run: float | None
    time_share: float | None
    """Share of the phase's node time, 0 .. 1."""


class GroupShare(Record):
    """Nodes and time of one op type, one layer or one module.

    The time of an executed node that ran file nodes of several groups is in the group of its own op type, `several
    layers` or `several modules`, which may have no node.
    """

    name: str
    nodes: int
    """File nodes."""
    added_nodes: int = 0
    """Nodes that ONNX Runtime added."""
    nodes_by_provider: dict[str, int]
    host_us_per_run: float | None
    time_share: float | None
    read_bytes: int | None = None
    """Weights, and cached keys and values, that one step reads; null if the graph is unknown."""
    flops: int | None = None
    """Arithmetic of products and attention in one step; null if the graph is unknown."""
    ceiling_share: float | None = None
    """Share of `host_us_per_run` that this work takes at the measured rates of the machine, at most 1."""


class Partition(Record):
    """A run of consecutive nodes of the plan on one provider."""

    index: int
    provider: str
    first_position: int
    nodes: int


CopyDirection = Literal["host_to_device", "device_to_host", "host_to_host", "device_to_device", "unknown"]


class Copy(Record):
    """A copy of a tensor between devices."""

    kind: Literal["memcpy_node", "session_input", "session_output"]
    direction: CopyDirection
    name: str
    """Name of the Memcpy node, graph input or graph output."""
    tensor: str | None = None
    """The tensor that a Memcpy node copies, from the optimised graph or the native log."""
    bytes_per_run: int | None
    host_us_per_run: float | None
    """Time of the wait and of the copy, in sum."""
    caused_by: tuple[str, ...] = ()
    """Nodes that require a Memcpy node, because they read or write the tensor in host memory."""
    cause_missing_reason: str = ""
    """Why these nodes are unknown; empty if they are known, and for session inputs and outputs."""
    source: Source


class PhaseCost(Record):
    """Cost of fallbacks and copies in one run of the phase, and per token. null: unknown."""

    partitions: int
    copies: int
    """Memcpy nodes, and inputs and outputs bound in other memory."""
    copy_bytes_per_run: int | None
    copy_bytes_at_least: int
    """Bytes of copies of known size."""
    host_wait_us_per_run: float | None
    """Host time of Memcpy nodes: waits and copies, in sum."""
    tokens_per_run: int | None
    """New tokens in all rows of one observed run; null without tokens."""
    copy_bytes_per_token: float | None
    host_wait_us_per_token: float | None


class SubgraphNode(Record):
    """A node in a control-flow subgraph (If, Loop, Scan)."""

    name: str
    op_type: str | None
    provider: str | None = None
    module: str | None = None
    replaces: tuple[str, ...] = ()
    """File nodes that it is a part of: functions that ONNX Runtime inlined."""


class Subgraphs(Record):
    """Nodes in control-flow subgraphs; other figures of the phase exclude them."""

    nodes: int
    """Nodes in ONNX Runtime's list, which may omit nodes of a provider with another layout."""
    is_known: bool = True
    """False if ONNX Runtime has no list, so that these nodes are unknown."""
    on_cpu: tuple[SubgraphNode, ...] = ()
    """Nodes on the CPU provider."""
    function_nodes: tuple[SubgraphNode, ...] = ()
    """Nodes of inlined functions of the main graph; `file_nodes` has these functions."""
    copies: int | None
    """Memcpy nodes, from the log; null without a log at INFO."""
    may_have_more_copies: bool | None = None
    """There may be further copies: tensors of the main graph are copied to the subgraph's device without a Memcpy node
    and a log line."""


Bound = Literal["memory", "compute", "launches", "copies", "waiting", "indeterminate"]


class PhaseBound(Record):
    """What bounds the steps of a phase, from the measured rates of the machine."""

    bound_by: Bound
    read_bytes: int | None
    """Weights, and cached keys and values, of one step; null if the graph is unknown."""
    flops: int | None
    """Arithmetic of products and attention in one step; null if the graph is unknown."""
    shares: dict[Bound, float]
    """Share of a step that each part takes at its measured rate, at most 1."""
    sentence: str


class StepTimes(Record):
    """Speed of one phase. A step is the session run and the host work around it.

    Percentiles are interpolated linearly.
    """

    steps: int
    """Number of steps in the speed figures, described by `timing_note`."""
    tokens: int
    """New tokens in all rows of the timed steps, without padding and finished rows."""
    seconds: float | None
    """Wall time of the timed steps."""
    tokens_per_second: float | None
    step_p50_ms: float | None
    step_p95_ms: float | None
    step_p99_ms: float | None
    overhead_p50_ms: float | None
    """Median time per step outside the session run."""
    profiled: bool | None = None
    """Whether the timed steps were profiled, which slows them down; null without timed steps."""
    timing_note: str
    """The steps that the figures cover."""


class Phase(StepTimes):
    """Placement, partitions, copies and time of prefill or decode."""

    name: PhaseName
    file: str
    file_nodes: tuple[FileNode, ...]
    """The nodes of the file. Counts and shares are of these, without folded nodes."""
    nodes: tuple[NodePlacement, ...]
    """The executed nodes, in execution order."""
    providers: tuple[ProviderShare, ...]
    by_op_type: tuple[GroupShare, ...]
    by_layer: tuple[GroupShare, ...]
    by_module: tuple[GroupShare, ...]
    partitions: tuple[Partition, ...]
    copies: tuple[Copy, ...]
    cost: PhaseCost | None = None
    observed_runs: int
    subgraphs: Subgraphs | None = None
    """null without control flow."""
    folded_nodes: int | None = None
    """Number of file nodes, if ONNX Runtime folded all of them at load time; else null."""
    bound: PhaseBound | None = None
    """null without times."""


class RejectedPart(Record):
    """The smallest part of a graph that the preferred provider rejects, found by bisection."""

    file: str
    provider: str
    nodes: tuple[str, ...]
    evidence: str
    minimal: bool
    """Every smaller part that was tried is accepted; false if the time ran out."""
    attempts: int
    neg_added: bool = False
    """The model also has a Neg, because a compiling provider may reject partitions of a single node."""


class CacheState(Record):
    """One cache buffer: port, memory, and whether it stayed in place."""

    name: str
    layer: int
    kind: str
    memory: str
    size_bytes: int
    in_place: bool


class Cache(Record):
    """Memory of the KV cache, and whether it stayed in place."""

    states: int
    size_bytes: int
    memories: dict[str, int]
    """Memory info name -> bytes."""
    in_place_states: int
    """States whose past and present were one buffer in every observed step."""
    address_changes: int
    checked_steps: int | None = None
    """Steps with compared addresses of past and present; null if not counted."""
    copied_bytes: int = 0
    """Cache bytes that the last step copied to other buffers, because present is a new tensor; 0 if none or not
    counted.
    """
    entries: tuple[CacheState, ...]
    source: Source = "binding"


class Totals(Record):
    """Time of the whole run, in seconds."""

    session_load_seconds: float
    tokenizer_load_seconds: float
    first_token_seconds: float | None
    prompt_tokens: int
    new_tokens: int
    finish_reason: Literal["stop", "length", "cache_full", "interrupted", "error"]
    finish_detail: str


class Check(Record):
    """A consistency check of the report."""

    key: str = ""
    """Stable identifier."""
    part: str = ""
    """Phase or ONNX file."""
    name: str
    """Displayed name."""
    passed: bool
    detail: str


class SourceStatement(Record):
    """Coverage of one source in this run."""

    source: Source
    available: bool
    covers: str


class SourceConflict(Record):
    """A conflict between sources about one node."""

    phase: PhaseName
    node: str
    detail: str
    sources: tuple[Source, ...]


class PhaseSummary(Record):
    """Summary figures of one phase."""

    phase: PhaseName
    nodes: int
    """File nodes, without folded nodes."""
    nodes_by_provider: dict[str, int]
    share: float | None
    """File nodes on the preferred provider, divided by `nodes`; null without nodes."""
    fallback_nodes: int
    """File nodes that are not on the preferred provider."""
    added_nodes: int
    """Nodes that ONNX Runtime added, such as copies."""
    folded_nodes: int
    """File nodes that ONNX Runtime computed or removed at load time."""
    reasons: dict[str, int]
    """Reason code -> number of file nodes, including control-flow subgraphs, relative to the first available preferred
    provider; 0 for a reason of nodes that ONNX Runtime added."""
    copies: int
    copy_bytes_per_run: int | None
    tokens_per_second: float | None
    step_p50_ms: float | None


class Summary(Record):
    """Summary figures of a run, for comparing many reports."""

    preferred_provider: str | None
    """The preferred provider: first of the chain; null without a chain."""
    state: Literal["all", "nearly", "partly", "none", "refused", "empty", "nothing", "failed"]
    """How much runs on the preferred provider. nearly: all but harmless fallbacks. empty: no nodes to run. nothing: no
    known nodes. failed: the run failed."""
    verdict: str
    """One-sentence summary."""
    phases: tuple[PhaseSummary, ...]
    cache_in_place: bool | None
    """null without a cache, or if not observed."""
    checks_failed: int
    limits_exceeded: int
    conflicts: int
    """Nodes with conflicting sources."""


class Report(Record):
    """The partition report of one run."""

    schema_id: Literal["partita.report/1"] = Field(default="partita.report/1", alias="schema")
    created: str
    """UTC, ISO 8601."""
    partita_version: str
    summary: Summary | None = None
    environment: Environment
    package: PackageFacts | None
    """null if the model is not a package."""
    model: ModelFacts | None
    """null if the model is a package."""
    request: Request
    chain: tuple[ChainEntry, ...]
    phases: tuple[Phase, ...]
    fallbacks: tuple[Fallback, ...]
    kernel_paths: tuple[KernelPath, ...] = ()
    """Executed nodes whose operator has several kernels, with the kernel that ran."""
    rejected_parts: tuple[RejectedPart, ...] = ()
    probing: Probing | None = None
    """null if probing was off, interrupted or unnecessary."""
    interruptions: tuple[Interruption, ...] = ()
    """Work that Ctrl-C stopped: session runs of `place`, or probes. For a generation see `totals`."""
    failure: str | None = None
    """Why a run of `place` failed, so that placed nodes may not run. For a generation see `totals`. null if none
    failed."""
    cache: Cache | None
    """null for a model that is not a package."""
    memory: Memory
    cpu: tuple[CpuSession, ...] = ()
    """Threads and kernels of the CPU provider, per ONNX file; empty if it is not in the chain."""
    totals: Totals | None
    """null without a generation."""
    speculation: Speculation | None = None
    """null without speculative decoding."""
    dry_run: DryRunFacts | None
    """null if every device was real; otherwise the report has no times."""
    exceeded_limits: tuple[str, ...] = ()
    """Exceeded limits of the request, one sentence each."""
    checks: tuple[Check, ...]
    sources: tuple[SourceStatement, ...]
    conflicts: tuple[SourceConflict, ...]
    notes: tuple[str, ...]
