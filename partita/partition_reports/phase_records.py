"""Nodes, copies, times and figures of one phase: part of the schema `partita.report/1`.

Rows are the nodes of the ONNX file, with the executed nodes that ran them. The share of a provider is the number of
file nodes on it, divided by the number of file nodes that ONNX Runtime did not fold. Nodes that ONNX Runtime added are
counted separately and are in no share. A file node that ran as several executed nodes counts once, on the least
preferred of their providers.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from partita.observations.names import UNKNOWN
from partita.observations.records import PhaseName, Record, Source

FEW_STEPS = 10
"""With fewer steps a speed is too uncertain to compare."""
TOO_FEW = "too few for a reliable speed"
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


Node = FileNode | NodePlacement


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

    @property
    def placed(self) -> tuple[FileNode, ...]:
        """File nodes that ONNX Runtime did not fold, the base of every share."""
        return tuple(row for row in self.file_nodes if row.state != "folded")

    @property
    def rows(self) -> tuple[Node, ...]:
        """File nodes that were not folded, then nodes that ONNX Runtime added."""
        return *self.placed, *(node for node in self.nodes if node.added)

    @property
    def file_counts(self) -> Counter[str]:
        """File nodes per provider, without folded nodes."""
        return Counter(row.provider or UNKNOWN for row in self.placed)

    @property
    def added_count(self) -> int:
        """Number of nodes that ONNX Runtime added."""
        return sum(node.added for node in self.nodes)

    @property
    def folded_count(self) -> int:
        """Number of file nodes that ONNX Runtime folded."""
        return len(self.file_nodes) - len(self.placed)

    @property
    def ran_by(self) -> dict[str, tuple[FileNode, ...]]:
        """Executed node -> the file nodes that it runs."""
        found: dict[str, tuple[FileNode, ...]] = {}
        for row in self.file_nodes:
            for name in row.ran_as:
                found[name] = (*found.get(name, ()), row)
        return found

    @property
    def is_known(self) -> bool:
        """Whether its nodes are known (there may be none)."""
        return bool(self.nodes) or self.folded_nodes is not None

    @property
    def has_few_steps(self) -> bool:
        """Whether its speed has too few steps; prefill never counts as such."""
        return self.name != "prefill" and 0 < self.steps < FEW_STEPS

    @property
    def subgraph_copies(self) -> int | None:
        """Copies in control-flow subgraphs in one run; None if there may be more than the sources show."""
        if self.subgraphs is None:
            return 0
        return None if self.subgraphs.may_have_more_copies else self.subgraphs.copies
