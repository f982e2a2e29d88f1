"""Records of a diagnosis in a report: a fallback with its reasons, experiments and cost."""

from __future__ import annotations

from collections.abc import Container

from partita.observations.codes import EvidenceKind
from partita.observations.facts import Factor, Outcome
from partita.observations.records import Code, PhaseName, Record


class VariantRecord(Record):
    """One experiment: a model of this node, opened on one provider and the CPU provider."""

    factor: Factor
    """The changed factor."""
    change: str
    """The change as text, e.g. `float32 in place of int64`; empty for as_is."""
    outcome: Outcome
    message: str
    """The log line or error; empty without one."""
    cached: bool
    """The outcome is from an earlier run with the same ONNX Runtime, device and options."""
    after: str = ""
    """The new value, e.g. `float32` or `webgpu.enableInt64=1`; empty for a change without a replaced value."""
    before: str = ""
    """The replaced value."""
    neg_added: bool = False
    """A Neg was added to the node: a compiling provider may reject a partition of a single node."""


class FallbackCost(Record):
    """The cost of a fallback."""

    copies: tuple[str, ...]
    """Memcpy nodes caused by this node; a copy can have several causes."""
    copy_bytes_per_run: int | None
    """Null when the size of a copy is unknown."""
    copy_wait_us_per_run: float | None
    """Wait and copy time."""
    host_us_per_run: float | None
    """Time of the node itself."""
    time_share: float | None
    """Fraction of the phase's node time, 0 .. 1."""
    harmless: bool | None
    """It causes no copy and almost no time; null if unknown."""
    harmless_reason: str
    """The reason for `harmless`, as text."""


class ProviderRejection(Record):
    """Why a provider of the chain does not run a node."""

    reason: Code
    """A provider-level reason if the provider is unavailable."""
    evidence_kind: EvidenceKind
    evidence: str
    remedy: str
    variants: tuple[VariantRecord, ...] = ()
    """Probes of this node with this provider, the unchanged node first."""
    missing_probes: str = ""
    """Why experiments are missing or incomplete; empty when they are complete or not needed."""
    basis: str = ""
    """Source of the evidence, an entry of the precedence table: `line`, `alone`."""
    other_reasons: tuple[SkippedProvider, ...] = ()
    """Other reasons with evidence, in the order of precedence, without probes."""


class SkippedProvider(ProviderRejection):
    """A provider of the chain before the node's provider, and why it does not run the node."""

    provider: str
    """ONNX Runtime's name."""


class KernelPath(Record):
    """The kernel that ran an executed node, for an operator with several kernels on its provider."""

    phase: PhaseName
    node: str
    op_type: str | None
    provider: str
    path: str
    """e.g. flash; `unknown` if nothing names it."""
    is_slow: bool
    """The provider has a faster kernel for another form of the operator."""
    evidence_kind: EvidenceKind
    """logged: the log of a run or a device program in the profile. probed: a changed node is faster in a
    one-node session. derived: a rule about attributes, types and inputs. none: unknown."""
    evidence: str
    cause: str
    """Why it is slow; empty for another path."""
    remedy: str
    """Change that selects a faster kernel; empty for another path."""
    unknown: str = ""
    """A property of the kernel that no source reports, e.g. its instruction set; empty for none."""
    module: str | None
    host_us_per_run: float | None
    time_share: float | None
    """Fraction of the phase's node time, 0 .. 1."""


class Fallback(ProviderRejection):
    """A node that is not on the preferred provider, with the reason."""

    phase: PhaseName
    node: str
    op_type: str | None
    preferred_provider: str
    provider: str
    module: str | None
    source_line: str | None
    skipped: tuple[SkippedProvider, ...] = ()
    """The other providers of the chain before the node's provider, in order."""
    cost: FallbackCost | None = None
    """Null for a node of a refused chain, which never ran, and for a node in a control-flow subgraph."""

    @property
    def preferred(self) -> tuple[SkippedProvider, ...]:
        """Every provider of the chain before the node's provider, and why it does not run the node."""
        return (SkippedProvider.copy_of(self, provider=self.preferred_provider), *self.skipped)

    @property
    def codes(self) -> tuple[str, ...]:
        """The reason of every preferred provider, in the order of the chain."""
        return tuple(entry.reason for entry in self.preferred)

    def restricted_to(self, active: Container[str]) -> Fallback:
        """The record with only the `active` preferred providers; unchanged if none is active.

        A provider that did not start has the same reason for all nodes.
        """
        available = [entry for entry in self.preferred if entry.provider in active]
        if not available or len(available) == len(self.preferred):
            return self
        first, *others = available
        own = {name: getattr(first, name) for name in ProviderRejection.model_fields}
        return self.model_copy(update={**own, "preferred_provider": first.provider, "skipped": tuple(others)})
