"""What a diagnosis is on disk: a node that is not on its provider, why, what was tried, and what it costs."""

from __future__ import annotations

from collections.abc import Container

from partita.observations.codes import EvidenceKind
from partita.observations.facts import Factor, Outcome
from partita.observations.records import Code, PhaseName, Record


class VariantRecord(Record):
    """One experiment: a model of this one node, opened on one provider with only the CPU provider behind it."""

    factor: Factor
    """What was changed."""
    change: str
    """In words, e.g. `float32 in place of int64`; empty for as_is."""
    outcome: Outcome
    message: str
    """What was logged or raised; empty when nothing was."""
    cached: bool
    """Known from an earlier run with the same ONNX Runtime, device and options."""
    now: str = ""
    """What took the place of something else, e.g. `float32`, or `webgpu.enableInt64=1`; empty for other changes."""
    before: str = ""
    """What that took the place of."""
    neg_added: bool = False
    """A Neg was added to the node: a compiling provider may reject a partition of a single node."""


class FallbackCost(Record):
    """What it costs that a node is not on the preferred provider."""

    copies: tuple[str, ...]
    """Memcpy nodes that are there because of this node; one copy can have several causes."""
    copy_bytes_per_run: int | None
    """Null when the size of one of them is not known."""
    copy_wait_us_per_run: float | None
    """Wait and copy together."""
    host_us_per_run: float | None
    """Time of the node itself."""
    time_share: float | None
    """Part of the phase's node time, 0 .. 1."""
    harmless: bool | None
    """It causes no copy and takes almost no time; null if unknown."""
    why: str
    """The ground for `harmless`, in words."""


class SkippedProvider(Record):
    """A provider between the preferred provider and the node's provider in the chain, and why the node is not on it."""

    provider: str
    """ONNX Runtime's name."""
    reason: Code
    evidence_kind: EvidenceKind
    evidence: str
    remedy: str
    variants: tuple[VariantRecord, ...] = ()
    """Probes of this node with this provider, the unchanged node first."""
    missing_probes: str = ""
    """Why there are no experiments, or not all; empty when they are complete, or were not called for."""
    ground: str = ""
    """Source of the evidence, an entry of the precedence table: `line`, `alone`; empty in older reports."""
    lost: tuple[SkippedProvider, ...] = ()
    """The other reasons that evidence was found for, in the order of precedence; without probes of their own."""


class Fallback(Record):
    """A node that is not on the preferred provider, and why."""

    phase: PhaseName
    node: str
    op_type: str | None
    preferred_provider: str
    provider: str
    reason: Code
    """A provider-level one when the preferred provider is not there at all."""
    evidence_kind: EvidenceKind
    evidence: str
    remedy: str
    module: str | None
    source_line: str | None
    variants: tuple[VariantRecord, ...] = ()
    """Probes of this node, the unchanged node first."""
    missing_probes: str = ""
    """Why there are no experiments, or not all; empty when they are complete, or were not called for."""
    ground: str = ""
    """Source of the evidence, an entry of the precedence table: `line`, `alone`; empty in older reports."""
    lost: tuple[SkippedProvider, ...] = ()
    """The other reasons that evidence was found for with the preferred provider, in the order of precedence."""
    skipped: tuple[SkippedProvider, ...] = ()
    """The other providers of the chain before the node's provider, in order."""
    cost: FallbackCost | None = None
    """Null for a node of a refusal, which never ran, and for one in a control-flow subgraph."""

    @property
    def preferred(self) -> tuple[SkippedProvider, ...]:
        """Every provider of the chain before the node's provider, and why the node is not on it."""
        first = SkippedProvider(
            provider=self.preferred_provider,
            reason=self.reason,
            evidence_kind=self.evidence_kind,
            evidence=self.evidence,
            remedy=self.remedy,
            variants=self.variants,
            missing_probes=self.missing_probes,
            ground=self.ground,
            lost=self.lost,
        )
        return (first, *self.skipped)

    @property
    def codes(self) -> tuple[str, ...]:
        """The reason of every provider that was preferred and skipped, in the order of the chain."""
        return tuple(entry.reason for entry in self.preferred)

    def about(self, provider: str | None) -> SkippedProvider | None:
        """Why the node is not on `provider`; None without a reason for it."""
        return next((entry for entry in self.preferred if entry.provider == provider), None)

    def decisive(self, active: Container[str]) -> SkippedProvider:
        """The first preferred provider among the `active` providers of the chain; without one, the first.

        A provider that did not start has one reason for all nodes.
        """
        return next((entry for entry in self.preferred if entry.provider in active), self.preferred[0])

    def among(self, active: Container[str]) -> Fallback:
        """The same with nothing but the providers of the chain that were there: the first of them is `wanted`. As it is
        where none was.
        """
        there = [entry for entry in self.preferred if entry.provider in active]
        if not there or len(there) == len(self.preferred):
            return self
        first, *others = there
        own = {name: getattr(first, name) for name in SkippedProvider.model_fields if name != "provider"}
        return self.model_copy(update={**own, "preferred_provider": first.provider, "skipped": tuple(others)})
