"""The partition report as it is written to disk: frozen, versioned, every number with its unit in its name.

Schema `partita.report/1`; the JSON Schema is published in docs/report.schema.json. Numbers are measured or counted;
what is not known is null. The schema keeps its number while it only grows: a new field has a default, so that older
reports are read, and is ignored by an older Partita.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from partita.diagnosis.records import Fallback
from partita.observations.codes import Interruption
from partita.observations.cpu import CpuSession
from partita.observations.records import (
    ChainEntry,
    Environment,
    Memory,
    PackageFacts,
    PhaseName,
    Probing,
    Record,
    Source,
)
from partita.partition_reports.request_records import DryRunFacts, ModelFacts, Request
from partita.partition_reports.speculation import Speculation

SCHEMA = "partita.report/1"


class NodePlacement(Record):
    """One node of the final plan and the provider that runs it."""

    position: int
    """0-based position in the execution order."""
    name: str
    op_type: str | None
    provider: str | None
    """None when no source could tell; then a disagreement says so."""
    module: str | None
    layer: int | None
    """Of its module; that of a Memcpy node is the layer of the node that makes it necessary, that of a compiled one the
    layer in which it begins."""
    host_us_per_run: float | None
    """Median host time over the observed runs of this phase."""
    output_bytes: int | None
    """In the last observed run of this phase."""
    replaces: tuple[str, ...]
    """Exported nodes that this node took the place of: those of a compiled subgraph, or what a fused node replaced, as
    far as the optimised graph or its name tells."""
    replaces_op_types: tuple[str, ...] = ()
    """The operator of each of them, as the ONNX file has it; empty in a report that was written without."""
    replaces_modules: tuple[str | None, ...] = ()
    """The module of each of them; empty in a report that was written without."""
    keys: tuple[str, ...] = ()
    """What the node is known by in every report of the model: the nodes of the file whose work it does, by name. Empty
    for a Memcpy node, and in a report that was written without.
    """
    element_type: str | None = None
    """Of the first floating-point output as the node ran, e.g. float16: what it computes in. Null where it makes none,
    of a compiled node, which does not say, and in a report that was written without.
    """
    matrix_type: str | None = None
    """Of the weight that it reads, as the ONNX file has it: another one than `element_type` where a Cast stands between
    them. Null where it reads none, and in a report that was written without.
    """
    sources: tuple[Source, ...]


class ProviderShare(Record):
    """What one provider does in one phase."""

    provider: str
    nodes: int
    exported_nodes: int | None = None
    """Nodes of the ONNX file behind them: each under its own name, and those that others took the place of."""
    op_types: dict[str, int]
    """A compiled subgraph counts with the operators of its nodes."""
    host_us_per_run: float | None
    time_share: float | None
    """Part of the phase's node time, 0 .. 1."""


class GroupShare(Record):
    """Nodes and time of one op type, one layer or one module."""

    name: str
    nodes: int
    nodes_by_provider: dict[str, int]
    host_us_per_run: float | None
    time_share: float | None


class BoundaryTensor(Record):
    """A tensor that enters or leaves a partition."""

    name: str
    direction: Literal["in", "out"]
    other_side: str
    """Partition index on the other side, or `session`."""
    size_bytes: int | None


class Partition(Record):
    """A run of consecutive nodes of the plan on one provider."""

    index: int
    provider: str
    first_position: int
    nodes: int
    boundary: tuple[BoundaryTensor, ...]


class Copy(Record):
    """A tensor that moves between devices."""

    kind: Literal["memcpy_node", "session_input", "session_output"]
    direction: Literal["host_to_device", "device_to_host", "host_to_host", "device_to_device", "unknown"]
    name: str
    """Memcpy node, or graph input or output."""
    tensor: str | None = None
    """The tensor that a Memcpy node copies, where the optimised graph or the native log tells."""
    bytes_per_run: int | None
    host_us_per_run: float | None
    """Wait and copy together: the host cannot tell them apart."""
    caused_by: tuple[str, ...] = ()
    """Nodes that make a Memcpy node necessary: they read or write the tensor in host memory."""
    cause_unknown: str = ""
    """Why no such node can be named; empty when there are some, and for copies at the session border."""
    source: Source


class PhaseCost(Record):
    """What leaving the preferred provider costs in one run of the phase, and per token. Null where it is not known."""

    partitions: int
    crossings: int
    """Tensors that one partition hands to another."""
    crossing_bytes_per_run: int | None
    copies: int
    """Memcpy nodes, and inputs and outputs that are bound in another memory."""
    copy_bytes_per_run: int | None
    copy_bytes_at_least: int
    """Of the copies whose size is known."""
    host_wait_us_per_run: float | None
    """Host time in Memcpy nodes: wait and copy together."""
    tokens_per_run: int | None
    """New tokens over all rows of one observed run; null where there are no tokens."""
    copy_bytes_per_token: float | None
    host_wait_us_per_token: float | None


class BodyNode(Record):
    """A node in the body of an If, a Loop or a Scan."""

    name: str
    op_type: str | None
    provider: str | None = None
    """Null in a report that was written without, which names those on the CPU only."""
    module: str | None = None
    replaces: tuple[str, ...] = ()
    """Exported nodes that it is a part of: functions that ONNX Runtime unfolded."""
    replaces_op_types: tuple[str, ...] = ()
    replaces_modules: tuple[str | None, ...] = ()


class Bodies(Record):
    """Nodes in the bodies of If, Loop and Scan. They are in no other figure of the phase."""

    nodes: int
    """Those that ONNX Runtime lists; it can leave out nodes of a provider that prefers another layout."""
    listed: bool = True
    """False where it has no such list: then nothing is known of the nodes in bodies."""
    cpu_nodes: tuple[str, ...]
    """`on_cpu` for people, `NAME (OPERATOR)` each."""
    on_cpu: tuple[BodyNode, ...] = ()
    """Those on the CPU provider."""
    parts: tuple[BodyNode, ...] = ()
    """Those of functions of the main graph that ONNX Runtime unfolded: they count in requirements."""
    copies: int | None
    """Memcpy nodes, from the log; null when the log was not at INFO."""
    unseen: bool | None = None
    """There may be copies beside those: what a body reads from around it is copied to its device without a Memcpy node
    and without a line. Null in a report that was written without."""

    @model_validator(mode="before")
    @classmethod
    def _older(cls, given: Any) -> Any:
        """What was written without the nodes as data has them in its text."""
        if not isinstance(given, dict) or "on_cpu" in given or not isinstance(given.get("cpu_nodes"), list | tuple):
            return given
        parts = [str(entry).removesuffix(")").rpartition(" (") for entry in given["cpu_nodes"]]
        nodes = [{"name": name, "op_type": op} if cut else {"name": op, "op_type": None} for name, cut, op in parts]
        return {**given, "on_cpu": nodes}


class Phase(Record):
    """Placement, partitions, copies and time of prefill or decode."""

    name: PhaseName
    file: str
    nodes: tuple[NodePlacement, ...]
    providers: tuple[ProviderShare, ...]
    by_op_type: tuple[GroupShare, ...]
    by_layer: tuple[GroupShare, ...]
    by_module: tuple[GroupShare, ...]
    partitions: tuple[Partition, ...]
    copies: tuple[Copy, ...]
    cost: PhaseCost | None = None
    observed_runs: int
    steps: int
    """Steps that the speed figures cover; `timing_note` says which."""
    tokens: int
    """New tokens over all rows that the timed steps handled."""
    seconds: float | None
    """Wall time of the timed steps."""
    tokens_per_second: float | None
    step_p50_ms: float | None
    """A step is the session run and the host work around it; percentiles interpolate linearly between ranks."""
    step_p95_ms: float | None
    step_p99_ms: float | None
    overhead_p50_ms: float | None
    """Median time per step outside the session run."""
    profiled: bool | None = None
    """Whether the timed steps were profiled, which makes them slower; null where none was timed, and in reports of
    earlier versions.
    """
    bodies: Bodies | None = None
    """Null when the file has no control flow."""
    folded: int | None = None
    """Nodes of the file, where ONNX Runtime folded all of them at load time; null otherwise."""
    timing_note: str
    """Which steps the figures cover, e.g. whether observed steps are in them."""


class RejectedPart(Record):
    """The smallest part of a graph that the preferred provider does not open, found by bisection."""

    file: str
    provider: str
    nodes: tuple[str, ...]
    evidence: str
    minimal: bool
    """Every smaller part that was tried opens; false when the time was up before."""
    tries: int
    company: bool = False
    """A Neg stood beside it: a provider that compiles may take no partition of a single node."""


class CacheState(Record):
    """One buffer of the cache: its port, memory, and whether it stayed in place."""

    name: str
    layer: int
    kind: str
    memory: str
    size_bytes: int
    in_place: bool


class Cache(Record):
    """Where the KV cache lived, and whether it stayed there."""

    states: int
    size_bytes: int
    memories: dict[str, int]
    """Memory info name to bytes."""
    in_place_states: int
    """States whose past and present were one buffer at every observed step."""
    address_changes: int
    checked_steps: int | None = None
    """Steps at which the addresses of past and present were compared; null when nobody counted."""
    copied_bytes: int = 0
    """What the last step copied of the cache into other buffers, because its graph writes present anew; 0 where nothing
    was copied, or nobody counted.
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


class TimelineRun(Record):
    """One session run of the observation window, node by node, on the host's clock."""

    phase: PhaseName
    file: str
    run: int
    """0-based, per file."""
    tokens: int
    """New tokens per row; 0 where there are no tokens."""
    start_us: int
    """Since the profile of this file began; runs of two files have two clocks."""
    host_us: int
    earlier: bool = False
    """Of a generation before the one that the steps, tokens and speed of the report are of."""
    events: tuple[tuple[int, int, int], ...]
    """Position of the node in the phase, start in microseconds after the run's, and host time in microseconds."""


class Check(Record):
    """Something that has to add up, and whether it did."""

    key: str = ""
    """What it is, for programs; stays as it is when `name` is said otherwise. Empty in older reports."""
    part: str = ""
    """The phase or ONNX file that it is of."""
    name: str
    """For people."""
    passed: bool
    detail: str


class SourceStatement(Record):
    """What one source could and could not see in this run."""

    source: Source
    available: bool
    covers: str
    limits: str


class Disagreement(Record):
    """Two sources that say different things about one node."""

    phase: PhaseName
    node: str
    detail: str
    sources: tuple[Source, ...]


class PhaseSummary(Record):
    """Figures of one phase for the first lines of a view."""

    phase: PhaseName
    nodes: int
    nodes_by_provider: dict[str, int]
    elsewhere: int
    """Of them not on the preferred provider."""
    reasons: dict[str, int]
    """Reason code to the number of nodes that are elsewhere for it, those in control flow included: of the first
    preferred provider that was there, where there is one."""
    copies: int
    copy_bytes_per_run: int | None
    tokens_per_second: float | None
    step_p50_ms: float | None


class Summary(Record):
    """The verdict on a run in a few figures: what comparing many reports needs, without reading their nodes."""

    wanted: str | None
    """The first provider of the chain; null when there is none."""
    state: Literal["all", "nearly", "partly", "none", "refused", "empty", "nothing", "failed"]
    """How much of it ran there: nearly is all but what is harmless, nothing that no node is known, failed that a run
    failed, wherever the nodes are."""
    verdict: str
    """In one line."""
    phases: tuple[PhaseSummary, ...]
    cache_in_place: bool | None
    """Null without a cache, or when nobody looked."""
    checks_failed: int
    limits_exceeded: int
    disagreements: int
    """Nodes that sources disagree on."""


class Report(Record):
    """The partition report of one run."""

    schema_id: Literal["partita.report/1"] = Field(default="partita.report/1", alias="schema")
    created: str
    """UTC, ISO 8601."""
    partita_version: str
    summary: Summary | None = None
    """Null in a report that was written without."""
    environment: Environment
    package: PackageFacts | None
    """null when the model is no package."""
    model: ModelFacts | None
    """null when it is one."""
    request: Request
    chain: tuple[ChainEntry, ...]
    phases: tuple[Phase, ...]
    fallbacks: tuple[Fallback, ...]
    rejected: tuple[RejectedPart, ...] = ()
    probing: Probing | None = None
    """Null when probing was off or interrupted, or nothing called for it."""
    interrupted: tuple[Interruption, ...] = ()
    """What Ctrl-C cut short: the session runs of `place`, or the experiments on nodes that fell back. That of a
    generation is in `totals`.
    """
    failed: str | None = None
    """Why a run of `place` failed: the nodes were placed, and nothing shows that they run. That of a generation is in
    `totals`. Null when none failed, and in a report that was written without.
    """
    cache: Cache | None
    """null for a model that is no package."""
    memory: Memory
    cpu: tuple[CpuSession, ...] = ()
    """Threads and kernels of the CPU provider, per ONNX file; empty where it is not in the chain."""
    totals: Totals | None
    """null where nothing is generated."""
    speculation: Speculation | None = None
    """Null without speculative decoding."""
    dry_run: DryRunFacts | None
    """null when every device was real. Otherwise no time is given anywhere."""
    exceeded: tuple[str, ...] = ()
    """Limits of the request that were not met, one sentence each."""
    timeline: tuple[TimelineRun, ...] = ()
    """Runs of the observation window, in order; empty for a dry run."""
    checks: tuple[Check, ...]
    sources: tuple[SourceStatement, ...]
    disagreements: tuple[Disagreement, ...]
    notes: tuple[str, ...]
