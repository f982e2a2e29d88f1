"""Facts observed about one run, before interpretation; None if a source does not provide a fact.

Filled by `partita.runtime` and read by `partita.partition_reports.build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from partita.observations.codes import Interruption
from partita.observations.patterns import KernelRow, LogPattern
from partita.observations.records import CpuSession, Memory, Probing


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of the ONNX file, as exported."""

    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str | None = None
    """Module path in the source model, e.g. model.layers.0.mlp."""
    source: str | None = None
    """file:line of the modelling code that produced the node."""
    subgraph_nodes: tuple[GraphNode, ...] = ()
    """Nodes in its control-flow subgraphs at any depth; set for nodes of an optimised graph only."""
    subgraph_attribute: str = ""
    """The attribute whose subgraph contains it: `then_branch`; empty in the main graph."""
    form: tuple[tuple[str, str], ...] = ()
    """Attributes, types and constants that may select a kernel: facts of a `KernelRow`."""


@dataclass(frozen=True, slots=True)
class AssignedNode:
    """A node in ONNX Runtime's assignment list, which it writes after level 1 optimisation."""

    name: str
    op_type: str
    domain: str
    provider: str
    subgraph: int
    """Index of the list entry; nodes of one compiled subgraph share it."""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One execution of one node, from ONNX Runtime's profile."""

    run: int
    """0-based index of the session run within the observation window."""
    order: int
    """0-based position within its run, by start time."""
    name: str
    op_type: str
    provider: str
    start_us: int
    """Microseconds since the profile began."""
    host_us: int
    """Host time of the kernel; not device time on an asynchronous provider."""
    output_bytes: int
    output_shapes: tuple[str, ...]
    """e.g. float32[1,12,256]."""
    programs: tuple[str, ...] = ()
    """Programs that it ran on the device (WebGPU with time stamps)."""


@dataclass(frozen=True, slots=True)
class RunWindow:
    """One session run inside the observation window."""

    run: int
    phase: str
    """prefill, decode or run."""
    tokens: int
    """New tokens per row in this run (S); 0 where there are no tokens."""
    start_us: int
    host_us: int
    earlier: bool = False
    """The run belongs to an earlier generation than the reported steps, because a session is profiled once."""
    rows: int | None = None
    """Batch rows of the run; None: all."""


@dataclass(frozen=True, slots=True)
class PortFact:
    """Memory of a graph input or output, and the memory that ONNX Runtime expects."""

    name: str
    direction: str
    """input or output."""
    role: str
    """A role of the package contract, or state."""
    required_memory: str
    """Memory info name from ONNX Runtime: Cpu, Cuda, WebGPU_Buf, …"""
    bound_memory: str
    """Memory info name of the buffer that was bound."""
    bytes_per_decode_step: int | None
    """Bytes per decode step, or per run of a model that is not a package; None if unknown."""


@dataclass(frozen=True, slots=True)
class StateFact:
    """One state buffer, checked at the end of the run."""

    past: str
    present: str
    layer: int
    kind: str
    memory: str
    size_bytes: int
    same_address: bool
    """Past and present are one buffer, compared by address at every step of the observation window."""
    address_changes: int
    """Number of steps whose address differs from the previous step."""
    checked_steps: int | None = None
    """Steps with compared addresses; None if not counted."""
    copied_bytes: int = 0
    """Bytes that the last step copied to another buffer: all of past if present is a new tensor."""


Outcome = Literal["supported", "placed", "rejected", "failed", "crashed", "timed_out", "invalid"]
"""Outcome of a probe. supported: the node ran on the provider. placed: a dry run assigned it to the provider. rejected:
assigned to another provider. failed: session error. crashed: killed by a signal. invalid: the model is invalid."""
FAILED: frozenset[Outcome] = frozenset({"failed", "crashed", "timed_out"})
"""Outcomes that are failures of the provider."""
Factor = str
"""The property that a probe varies: rank, static_shape, output_shape, type, opset, attribute, input; none (`AS_IS`),
several (`COMBINED`), another node of the operator (`OTHER_FORM`), a provider option (`OPTION`), or neighbour nodes in
the same model (`NEIGHBOURS`)."""
AS_IS, COMBINED, OTHER_FORM, OPTION, NEIGHBOURS = "as_is", "combined", "other_form", "option", "neighbours"


@dataclass(frozen=True, slots=True)
class Substitution:
    """A replacement in a variant of a node."""

    after: str
    """e.g. float32."""
    before: str
    """e.g. int64."""
    location: str = ""
    """Place of the replacement: `in starts`, `as to`; empty: everywhere."""

    def __str__(self) -> str:
        """`float32 in place of int64 in starts`."""
        return " ".join(part for part in (self.after, "in place of", self.before, self.location) if part)


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """One probe: a model of one node, opened on one provider with only the CPU provider as fallback."""

    factor: Factor
    change: str
    """Difference of the variant from the node, e.g. `float32 in place of int64`; empty for as_is."""
    outcome: Outcome
    message: str
    """Log line or error message on one line; may be empty."""
    cached: bool = False
    """From an earlier run with the same ONNX Runtime, device and options."""
    factors: tuple[Factor, ...] = ()
    """Factors of a combined variant; for another form, `type` for different types."""
    substitution: Substitution | None = None
    """The change, if it is a replacement."""
    removes: bool = False
    """The change removes something."""
    function_inlined: bool = False
    """Supported only after ONNX Runtime inlined the node's function."""
    neg_added: bool = False
    """The model also has a Neg, because a compiling provider may reject partitions of a single node."""
    seconds: float | None = None
    """The fastest of several runs; None without."""

    @property
    def parts(self) -> tuple[Factor, ...]:
        """The factors of all its changes."""
        return self.factors or (self.factor,)

    @property
    def after(self) -> str:
        """The new value of a replacement that applies everywhere; empty for other changes."""
        return self.substitution.after if self.substitution is not None and not self.function_inlined else ""

    @property
    def before(self) -> str:
        """The value that `now` replaces."""
        return self.substitution.before if self.substitution is not None and self.after else ""


@dataclass(frozen=True, slots=True)
class NodeProbe:
    """Probes of a node on a provider: of a fallback node, or of a node on a slow kernel path."""

    node: str
    variants: tuple[ProbeRun, ...]
    """In execution order; the first is the unchanged node."""
    missing_probes: str = ""
    """Why probes are missing, e.g. the time budget; empty if they are complete."""
    omitted: int = 0
    """Combinations that were not tried because of their number."""


@dataclass(frozen=True, slots=True)
class RejectedPart:
    """The smallest part of a graph that the preferred provider rejects, found by bisection."""

    nodes: tuple[str, ...]
    message: str
    """The provider's message for this part, on one line."""
    minimal: bool
    """Every smaller part that was tried is accepted; False if the time ran out."""
    attempts: int
    is_whole_graph: bool = False
    """The part is the complete graph: the provider accepts every smaller part that was tried."""
    neg_added: bool = False
    """The model also has a Neg, as in probes of a node."""
    untested: str = ""
    """Why parts were not tried, e.g. an unknown type; empty if all were tried."""
    other_parts: tuple[RejectedPart, ...] = ()
    """Further disjoint parts; each is rejected in the graph without the previous parts."""
    rejected_subgraph_nodes: tuple[str, ...] = ()
    """Nodes in its control-flow subgraphs on which the provider fails individually; without any, nodes that it rejects
    individually."""
    rest_opens: bool = False
    """The provider accepts the graph without this part and `others`; False: unknown."""

    @property
    def parts(self) -> tuple[RejectedPart, ...]:
        """This part and `others`."""
        return (self, *self.other_parts)


OWN_MESSAGES = ("it is not among", "of its function", "the CPU provider runs it")
"""Beginnings of messages about a rejected node that are the laboratory's, not the provider's."""


@dataclass(frozen=True, slots=True)
class ProviderFacts:
    """Facts about one provider of the chain in one session."""

    patterns: tuple[LogPattern, ...] = ()
    """Log patterns with reasons."""
    message_patterns: tuple[LogPattern, ...] = ()
    """Patterns of its message about a node in a probe, with reasons."""
    budget: str = ""
    """The user's memory budget as written; empty if there is none."""
    probes: Mapping[str, NodeProbe] = field(default_factory=dict)
    """Node name -> its probes on this provider."""
    rejected: RejectedPart | None = None
    """Set if the provider rejected the graph."""
    kernels: tuple[KernelRow, ...] = ()
    """Rows of its kernel paths."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """Everything observed about one ONNX Runtime session."""

    file: str
    """ONNX file name within the package."""
    phases: tuple[str, ...]
    """Phases this session ran: prefill, decode or both."""
    graph: tuple[GraphNode, ...] = ()
    """Nodes of the main graph."""
    plan: tuple[tuple[str, ...], ...] | None = None
    """Node names per stream, from the plan file; None without a plan file."""
    assigned: tuple[AssignedNode, ...] | None = None
    """None if this ONNX Runtime has no assignment interface."""
    events: tuple[NodeEvent, ...] = ()
    runs: tuple[RunWindow, ...] = ()
    log: tuple[str, ...] = ()
    """Native log lines of session creation, INFO and above, without time stamps."""
    registered: tuple[str, ...] = ()
    """Providers the session registered, in order."""
    ports: tuple[PortFact, ...] = ()
    load_seconds: float = 0.0
    plan_devices: tuple[str, ...] | None = None
    """Device type of each stream of the plan as ONNX Runtime's number; 0 is the CPU."""
    providers: Mapping[str, ProviderFacts] = field(default_factory=dict)
    """ONNX Runtime's provider name -> facts."""
    constants: frozenset[str] = frozenset()
    """Constant tensors of the main graph; set in dry runs only."""
    fixed_shapes: frozenset[str] = frozenset()
    """Tensors of the main graph whose shape depends on input shapes only; set in dry runs only."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Pinned node -> the user's pin as written, e.g. cpu:lm_head."""
    subgraph_nodes: tuple[GraphNode, ...] = ()
    """Nodes in the subgraphs of If, Loop and Scan."""
    optimised: tuple[GraphNode, ...] | None = None
    """Nodes of the graph that ONNX Runtime runs, including Memcpy nodes, written by a second session. None if not
    requested or not available."""
    optimised_missing_reason: str = ""
    """Why the optimised graph is missing or not used, in one sentence."""
    cpu: CpuSession | None = None
    """Settings of the CPU provider; None if it is not in the chain."""
    run_log: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Phase -> native log lines of its first observed run. No entry: not captured."""

    def of(self, provider: str) -> ProviderFacts:
        """Facts about a provider by ONNX Runtime's name; empty facts for a provider outside the chain."""
        return self.providers.get(provider, ProviderFacts())

    def with_provider(self, provider: str, **changes: Any) -> SessionFacts:
        """A copy with changed facts about a provider; `changes`: fields of `ProviderFacts`."""
        return replace(self, providers={**self.providers, provider: replace(self.of(provider), **changes)})


@dataclass(frozen=True, slots=True)
class StepFact:
    """Timing of one step of the generation loop."""

    phase: str
    tokens: int
    """New tokens per row."""
    seconds: float
    """Wall time of the session run."""
    overhead_seconds: float
    """Wall time of this step outside the session run: binding inputs, sampling, detokenising."""
    observed: bool
    """The step ran with profiling, which slows it down; speed figures exclude it if other steps exist."""
    row_tokens: int | None = None
    """Input tokens of all rows without padding and finished rows; None if every row has `tokens`."""
    is_repeated: bool = False
    """The step recomputed earlier tokens; the last recomputing step also returned a new token."""
    drafted: int = 0
    """Verified draft tokens of all rows."""
    accepted: int = 0
    """Draft tokens that were accepted."""
    draft_seconds: float = 0.0
    """Time for drafting, part of `overhead_seconds`."""


@dataclass(frozen=True, slots=True)
class SpeculationFact:
    """Speculative decoding of a run."""

    kind: Literal["ngram", "draft"]
    draft: str | None = None
    """Name of the draft package."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run: its sessions, its steps and its end."""

    sessions: tuple[SessionFacts, ...]
    steps: tuple[StepFact, ...]
    memory: Memory
    states: tuple[StateFact, ...] = ()
    tokenizer_load_seconds: float = 0.0
    first_token_seconds: float | None = None
    """From the start of prefill to the first new token; None if there was none."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    finish_reason: str | None = None
    """stop, length, cache_full, interrupted, or error; None if no generation was requested."""
    finish_detail: str = ""
    probing: Probing | None = None
    """None if probing was off or no node fell back."""
    interruptions: tuple[Interruption, ...] = ()
    """Work that Ctrl-C stopped, other than a generation (`finish_reason`)."""
    failure: str | None = None
    """Why a run without generation failed; None if it did not."""
    notes: tuple[str, ...] = field(default=())
    """Notes for the report, one sentence each."""
    speculation: SpeculationFact | None = None
    """None without speculative decoding."""
