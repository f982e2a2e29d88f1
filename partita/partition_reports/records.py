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
from partita.partition_reports.phase_records import Node, Phase

SCHEMA = "partita.report/1"


class ModelInput(Record):
    """An input of a model that is not a package, with the shape used."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    """The shape used; null if its sizes are dynamic and no value could be generated, so that the model was not run."""

    @property
    def declared(self) -> str:
        """Type and shape as text: `float32[1,3]`."""
        return self.dtype if self.shape is None else f"{self.dtype}[{','.join(map(str, self.shape))}]"


class ModelFacts(Record):
    """The ONNX file that was run, if it is not a package."""

    file: str
    sha256: str
    """Hash of the ONNX file without `data_files`."""
    data_files: tuple[str, ...]
    """Files with external weights."""
    ir_version: int
    opsets: dict[str, int]
    """Operator set version by domain; "" is ai.onnx."""
    nodes: int
    """Nodes of the main graph."""
    inputs: tuple[ModelInput, ...]


class DryRunFacts(Record):
    """The simulated device of a dry run, and the parts of the report that are not real."""

    device: str
    """Name of the device profile."""
    device_name: str
    compute_capability: str
    memory_bytes: int
    multiprocessors: int
    provider_library: str
    """File of the real execution provider."""
    onnxruntime_version: str
    cuda_version: str
    """The version that the stub libraries report."""
    stub_build: str
    """Build of the stub libraries that the process loaded."""
    not_real: tuple[str, ...]


class Request(Record):
    """The user's request."""

    verb: str
    path: str | None = None
    """Path of the package or model in the process that ran it."""
    chain: tuple[str, ...]
    """Provider names in the order given."""
    chain_source: str
    """`command line` or `default`, with the reason."""
    options: dict[str, str]
    threads: int | None
    prompt_tokens: int | None
    """null, as the next two fields, without a generation."""
    max_new_tokens: int | None
    prefill_chunk_tokens: int | None
    runs: int | None = None
    """Requested session runs of `place` per phase."""
    limits: dict[str, int] = Field(default_factory=dict)
    """Option name -> limit of the placement."""


class Speculation(Record):
    """Speculative decoding. Profiled steps have no draft tokens and are excluded."""

    kind: Literal["ngram", "draft"]
    draft: str | None
    """Name of the draft package; null for n-gram lookup."""
    steps: int
    """Decode steps without profiling."""
    drafting_steps: int
    """Steps that verified draft tokens."""
    drafted: int
    """Verified draft tokens."""
    accepted: int
    acceptance_rate: float | None
    """`accepted` divided by `drafted`; null without draft tokens."""
    tokens: int
    """New tokens of all rows."""
    tokens_per_step: float | None
    seconds: float
    """Wall time of the steps."""
    draft_seconds: float
    """Time for drafting, part of `seconds`, including runs of the draft model."""
    plain_token_ms: float | None
    """Median time per token of steps without draft tokens, without drafting time; null if there are none."""
    speedup: float | None
    """Estimated time without draft tokens, divided by the measured time. The estimate uses the median of steps without
    draft tokens and with the same number of rows; null without draft tokens, or without these steps.
    """


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


CacheStatus = Literal["no_cache", "not_checked", "copied", "moved", "in_place"]
"""no_cache: no cache or no states. not_checked: not observed. copied: past and present of a state were two buffers.
moved: one buffer whose address changed. in_place: one buffer at one address in every observed step.
"""


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

    @property
    def status(self) -> CacheStatus:
        """Status in the observed steps."""
        if not self.states:
            return "no_cache"
        if self.checked_steps == 0:
            return "not_checked"
        if self.in_place_states < self.states:
            return "copied"
        return "moved" if self.address_changes else "in_place"


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


StateName = Literal["all", "nearly", "partly", "none", "refused", "empty", "nothing", "failed"]


class Summary(Record):
    """Summary figures of a run, for comparing many reports."""

    preferred_provider: str | None
    """The preferred provider: first of the chain; null without a chain."""
    state: StateName
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

    @property
    def model_name(self) -> str:
        """Name of the package or file."""
        if self.package is not None:
            return self.package.name
        return self.model.file if self.model is not None else "unknown model"

    @property
    def preferred(self) -> str:
        """The first provider of the chain, by ONNX Runtime's name."""
        return self.chain[0].provider if self.chain else "no provider"

    @property
    def active(self) -> tuple[str, ...]:
        """Available providers of the chain, by ONNX Runtime's names."""
        return tuple(entry.provider for entry in self.chain if entry.status == "active")

    @property
    def unavailable(self) -> tuple[ChainEntry, ...]:
        """Providers of the chain that are missing or could not start."""
        return tuple(entry for entry in self.chain if entry.status == "unavailable")

    @property
    def used_phases(self) -> tuple[Phase, ...]:
        """Phases with nodes."""
        return tuple(phase for phase in self.phases if phase.nodes)

    @property
    def is_timed(self) -> bool:
        """Whether there are times; a dry run has none."""
        return self.dry_run is None

    @property
    def is_folded(self) -> bool:
        """Whether ONNX Runtime folded every phase, so that outputs are constants or inputs."""
        return bool(self.phases) and all(phase.folded_nodes is not None for phase in self.phases)

    @property
    def placements(self) -> list[list[Phase]]:
        """Phases with nodes, grouped by equal nodes, providers and copies."""
        found: dict[object, list[Phase]] = {}
        for phase in self.used_phases:
            nodes = tuple((node.name, node.provider) for node in phase.nodes)
            found.setdefault((nodes, tuple((copy.kind, copy.name) for copy in phase.copies)), []).append(phase)
        return list(found.values())

    @property
    def known_phases(self) -> tuple[Phase, ...]:
        """Phases whose nodes are known (there may be none)."""
        return tuple(phase for phase in self.phases if phase.is_known)

    @property
    def main_phase(self) -> Phase | None:
        """Decode, or the only phase; None if no phase is known."""
        phases = self.used_phases or self.known_phases
        return next((phase for phase in phases if phase.name == "decode"), phases[-1] if phases else None)

    @property
    def active_fallbacks(self) -> tuple[Fallback, ...]:
        """The fallbacks relative to available providers.

        An unavailable provider is not the reason for a node that another preferred provider could run.
        """
        active = self.active
        return tuple(entry.restricted_to(active) for entry in self.fallbacks)

    def fallback_nodes(self, phase: Phase) -> list[Node]:
        """File nodes, and nodes that ONNX Runtime added, that are not on the preferred provider."""
        return [node for node in phase.rows if node.provider != self.preferred]

    @property
    def failure_text(self) -> str | None:
        """Why a run failed, on one line; None if none did. An interrupted run did not fail."""
        reason = self.failure
        if reason is None and self.totals is not None and self.totals.finish_reason == "error":
            reason = self.totals.finish_detail or "the generation ended with an error"
        return None if reason is None else " ".join(reason.split())

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the run."""
        return "runs" in self.interruptions or (self.totals is not None and self.totals.finish_reason == "interrupted")

    @property
    def cache_in_place(self) -> bool | None:
        """Whether the cache stayed in place; None without a cache, or if not observed."""
        status = "no_cache" if self.cache is None else self.cache.status
        return None if status in ("no_cache", "not_checked") else status == "in_place"
