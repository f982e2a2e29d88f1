"""What an observer hands over: plain facts about one run, before any of them is interpreted.

Frozen dataclasses, filled by `partita.runtime` and read by `partita.partition_reports.build`. A fact that a source
could not give is None, never a made-up value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from partita.observations.codes import Interruption
from partita.observations.cpu import CpuSession
from partita.observations.log_pattern import LogPattern
from partita.observations.records import Memory, Probing


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of the ONNX file, as exported."""

    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str | None
    """Module path in the original model, e.g. model.layers.0.mlp."""
    module_class: str | None
    source: str | None
    """file:line of the modelling code that produced the node."""
    inside: tuple[GraphNode, ...] = ()
    """Nodes in its bodies, however deep; of nodes of an optimised graph only."""
    body: str = ""
    """The attribute whose graph it is in: `then_branch`; empty in the main graph."""
    matrix: str = ""
    """Element type of the largest constant of two dimensions or more that it reads, e.g. bfloat16; empty where it reads
    none. Of nodes of the file only.
    """


@dataclass(frozen=True, slots=True)
class AssignedNode:
    """A node in ONNX Runtime's assignment list (taken after level 1 optimisation)."""

    name: str
    op_type: str
    domain: str
    provider: str
    subgraph: int
    """Which entry of the list; nodes of one compiled subgraph share it."""


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
    """Host time around the kernel; on an asynchronous EP this is not device time."""
    output_bytes: int
    output_shapes: tuple[str, ...]
    """e.g. float32[1,12,256]."""


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
    """Of a generation before the one whose steps are told: a session is profiled once."""
    rows: int | None = None
    """Rows of the batch that the run was of; None: all."""


@dataclass(frozen=True, slots=True)
class PortFact:
    """Where a graph input or output lives, and where ONNX Runtime wants it."""

    name: str
    direction: str
    """input or output."""
    role: str
    """A role of the package, or state."""
    wanted_memory: str
    """Memory info name from ONNX Runtime: Cpu, Cuda, WebGPU_Buf, …"""
    bound_memory: str
    """Memory info name of the buffer that was bound."""
    bytes_per_decode_step: int | None
    """Of one decode step, or of one run of a model that is no package; None when it is not known."""


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
    """Times the address differed from the step before."""
    checked_steps: int | None = None
    """Steps at which the addresses were compared; None when nobody counted."""
    copied_bytes: int = 0
    """What the last step copied of it into another buffer: all of past, where present is made anew."""


Outcome = Literal["taken", "placed", "left", "failed", "crashed", "timed_out", "invalid"]
"""What became of an experiment: the provider took the node, claimed it in a dry run where it could not be run on the
CPU provider either, left it to another, its session failed to open, its process was killed by a signal, it did not
finish in time, or the model is invalid."""
FAILED: frozenset[Outcome] = frozenset({"failed", "crashed", "timed_out"})
"""Outcomes that are the provider's failure; a node that it leaves is none."""
Factor = str
"""What an experiment changed: nothing (`AS_IS`), several things (`COMBINED`), or what a factor of this name changes, of
which the runtime has a file each: rank, static_shape, output_shape, type, opset, attribute, input. `OTHER_FORM` is no
change: it is another node of the same operator. Nor are `OPTION`, the same node under another option of the provider,
and `NEIGHBOURS`, the same node with some that are next to it in the graph."""
AS_IS, COMBINED, OTHER_FORM, OPTION, NEIGHBOURS = "as_is", "combined", "other_form", "option", "neighbours"


@dataclass(frozen=True, slots=True)
class Swap:
    """One thing that a changed node has in place of another."""

    now: str
    """e.g. float32."""
    before: str
    """e.g. int64."""
    where: str = ""
    """When it is not everywhere: `in starts`, `as to`."""
    partly: bool = False
    """Some inputs of that type were left as they are."""

    def __str__(self) -> str:
        """`float32 in place of int64 in starts`."""
        return " ".join(part for part in (self.now, "in place of", self.before, self.where) if part)


@dataclass(frozen=True, slots=True)
class Trial:
    """One experiment: a model of one node, opened on one provider with only the CPU provider behind it."""

    factor: Factor
    change: str
    """What is different from the node as it is, e.g. `float32 in place of int64`; empty for as_is."""
    outcome: Outcome
    said: str
    """What was logged or raised, in one line; empty when nothing was."""
    cached: bool = False
    """Known from an earlier run with the same ONNX Runtime, device and options."""
    parts: tuple[Factor, ...] = ()
    """What was changed together, of a combined one; of another form, `type` where it has other types than the node, and
    `option` where the provider had another one."""
    swap: Swap | None = None
    """The change, where one thing took the place of another."""
    removes: bool = False
    """The change leaves something out."""
    unfolded: bool = False
    """Taken, but only as the nodes of its function, and not as itself."""
    kind: str = ""
    """What changes of this factor are, in words: `other types`; empty for as_is."""
    company: bool = False
    """A Neg stood beside the node: a provider that compiles may take no partition of a single node."""

    @property
    def now(self) -> str:
        """What took the place of something else, everywhere; empty for other changes."""
        return self.swap.now if self.swap is not None and not self.swap.partly and not self.unfolded else ""

    @property
    def before(self) -> str:
        """What that took the place of."""
        return self.swap.before if self.swap is not None and self.now else ""


@dataclass(frozen=True, slots=True)
class NodeProbe:
    """What experiments on a preferred provider tell of one node that is not on it."""

    node: str
    trials: tuple[Trial, ...]
    """In the order they were made; the first has nothing changed."""
    unprobed: str = ""
    """Why there are no experiments, or not all of them, e.g. the budget; empty when they are complete."""
    left_out: int = 0
    """Combinations of several changes that were not tried, because there are many."""


@dataclass(frozen=True, slots=True)
class RejectedPart:
    """The smallest part of a graph that the preferred provider does not open, found by bisection."""

    nodes: tuple[str, ...]
    said: str
    """What it said of this part, in one line."""
    minimal: bool
    """Every smaller part that was tried opens; False when the time was up before."""
    tries: int
    whole: bool = False
    """It is the graph as the file has it: no part that was cut out of the file and tried fails."""
    company: bool = False
    """A Neg stood beside it, as beside a node that is tried."""
    untried: str = ""
    """Why parts were not tried, e.g. a type that is not known; empty when all were that were wanted."""
    others: tuple[RejectedPart, ...] = ()
    """Further parts, none of which has a node of another: each fails without the ones before it."""
    inside: tuple[str, ...] = ()
    """Nodes in bodies of its nodes over which the provider fails when they are tried by themselves."""
    rest_opens: bool = False
    """Without this part and the others the provider opens the graph; else it is not known to."""

    @property
    def parts(self) -> tuple[RejectedPart, ...]:
        """This part and the others that the provider rejects."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class ProviderFacts:
    """What is known of one provider of the chain, in one session."""

    patterns: tuple[LogPattern, ...] = ()
    """How lines of the session's log give reasons away."""
    budget: str = ""
    """Its memory budget, as the user wrote it; empty when there is none."""
    probes: Mapping[str, NodeProbe] = field(default_factory=dict)
    """Experiments on it, by node; empty when nothing was probed."""
    rejected: RejectedPart | None = None
    """When it did not open the graph as a whole."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """Everything observed about one ONNX Runtime session."""

    file: str
    """ONNX file name within the package."""
    phases: tuple[str, ...]
    """Phases this session ran: prefill, decode or both."""
    graph: tuple[GraphNode, ...]
    """Nodes of the main graph."""
    plan: tuple[tuple[str, ...], ...] | None
    """Node names per stream, from the plan file; None when ONNX Runtime wrote none."""
    assigned: tuple[AssignedNode, ...] | None
    """None when this ONNX Runtime has no assignment interface."""
    events: tuple[NodeEvent, ...]
    runs: tuple[RunWindow, ...]
    log: tuple[str, ...]
    """Native log lines of session creation, INFO and above, without time stamps."""
    registered: tuple[str, ...]
    """Providers the session registered, in order."""
    ports: tuple[PortFact, ...]
    load_seconds: float
    plan_devices: tuple[str, ...] | None = None
    """Kind of device of each stream of the plan, in ONNX Runtime's numbers: 0 is the CPU."""
    providers: Mapping[str, ProviderFacts] = field(default_factory=dict)
    """What is known of each provider of the chain, by ONNX Runtime's name of it."""
    constants: frozenset[str] = frozenset()
    """Tensors of the main graph whose values stand in the file. Only a dry run asks for them, and for the next ones."""
    fixed_shapes: frozenset[str] = frozenset()
    """Tensors of the main graph whose shape follows from the shapes of the inputs alone."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Nodes that the user pinned to a provider, by name, and the pin as it was written, e.g. cpu:lm_head."""
    inner: tuple[GraphNode, ...] = ()
    """Nodes in the bodies of If, Loop and Scan."""
    optimised: tuple[GraphNode, ...] | None = None
    """Nodes of the graph as ONNX Runtime runs it, Memcpy nodes included, from a second session that writes it down.
    None when it was not asked for or could not be had."""
    optimised_why: str = ""
    """Why there is none, or why it is not used, in one sentence."""
    cpu: CpuSession | None = None
    """How the CPU provider was set up; None where it is not in the chain."""

    def of(self, provider: str) -> ProviderFacts:
        """What is known of one provider of the chain (ONNX Runtime's name); nothing of one that is not in it."""
        return self.providers.get(provider, ProviderFacts())

    def with_provider(self, provider: str, **changes: Any) -> SessionFacts:
        """The session with more known of one provider of the chain; `changes`: fields of `ProviderFacts`."""
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
    """Wall time of this step outside the session run: feeding, sampling, detokenising."""
    observed: bool
    """True while profiling was on; such steps are slower and stay out of the speed figures, if others are left."""
    row_tokens: int | None = None
    """Tokens taken in over all rows, padding and finished rows left out; None when every row took `tokens`."""
    again: bool = False
    """It read tokens that had been read before; the last such step made a new token, as a decode step would have."""
    width: int = 0
    """S: tokens that each row was fed, padding and rejected draft tokens included; 0 when not counted."""
    drafted: int = 0
    """Draft tokens of all rows that it verified."""
    accepted: int = 0
    """Draft tokens that were accepted."""
    draft_seconds: float = 0.0
    """Part of `overhead_seconds` that drafting took."""


@dataclass(frozen=True, slots=True)
class SpeculationFact:
    """Speculative decoding of a run."""

    kind: Literal["ngram", "draft"]
    draft: str | None = None
    """Name of the draft package."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One whole run: its sessions, its steps, and how it ended."""

    sessions: tuple[SessionFacts, ...]
    states: tuple[StateFact, ...]
    steps: tuple[StepFact, ...]
    memory: Memory
    tokenizer_load_seconds: float
    first_token_seconds: float | None
    """From the start of prefill to the first new token; None if none came."""
    prompt_tokens: int
    new_tokens: int
    finish_reason: str | None
    """stop, length, cache_full, interrupted, or error; None when nothing was to be generated."""
    row_prompts: tuple[int, ...] | None = None
    """Tokens of each row's prompt that steps read, so without those of a prefix; None where one row stands for all."""
    all_new_tokens: int | None = None
    """Of all rows together; None where one row stands for all."""
    requests: int | None = None
    """That took turns in the rows: prompt and new tokens are those of all of them; None: one for each row."""
    finish_detail: str = ""
    probing: Probing | None = None
    """None when probing was off, or no node fell back."""
    interrupted: tuple[Interruption, ...] = ()
    """What Ctrl-C cut short; how a generation ended is in `finish_reason`."""
    failed: str | None = None
    """Why a run failed, for a verb that generates nothing; None when none did."""
    notes: tuple[str, ...] = field(default=())
    """Anything the observer wants said in the report, one sentence each."""
    speculation: SpeculationFact | None = None
    """None without speculative decoding."""
