"""The target provider: its kernels, probes and their results, and the ranking of the variants of a model.

The caller passes the probing functions, because this folder may not import the runtime. A variant is a lowering of
attention and cache, and a form of experts and recurrences: ONNX Runtime's operators where the target supports them,
standard ones otherwise; without a probe, ONNX Runtime's where the lowering needs its operators anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from partita.export.trace import CONTRIB, Form
from partita.export.trace.attention import by_preference, lowering
from partita.export.weights.sources import weight_part
from partita.package.folder import Manifest
from partita.package.records import SmokeRecord, TargetRecord, Verification

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class GraphVariant:
    """A variant of a model's graphs."""

    attention: str
    """Name of a lowering."""
    form: Form
    """The form of experts and recurrences."""

    @property
    def is_usual(self) -> bool:
        """Whether the form is the default of this lowering."""
        return self == usual(self.attention)

    def __str__(self) -> str:
        """`gqa`, or `gqa with standard experts and recurrences`."""
        return self.attention if self.is_usual else f"{self.attention} with {self.form} experts and recurrences"


def usual(name: str) -> GraphVariant:
    """A lowering with its default form: ONNX Runtime's operators where it needs them anyway. Raises UsageError."""
    return GraphVariant(name, "contrib" if lowering(name).domains else "standard")


@dataclass(frozen=True, slots=True)
class Kernels:
    """Supported variants; the defaults are those of the CPU provider, which verifies every package."""

    symmetric: bool = False
    accuracy_level: int = 4
    bias: bool = True
    gather: bool = True
    experts: bool = True
    """It has the form's operator on stacks of experts."""
    block_sizes: Mapping[int, int] = field(default_factory=lambda: {4: 64, 8: 128})
    """Bits -> default block size."""
    smaller: tuple[int, ...] = (16, 32, 64)
    """Supported block sizes for weights whose rows the chosen size does not divide."""
    folds: bool = False
    """It is a compiler that fuses DequantizeLinear: forms in standard operators are probed first."""
    activations: str = "fp32"
    """The default of --activations for quantised products."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of probing a provider with one graph."""

    nodes: int
    unsupported: Mapping[str, int]
    """Operator -> number of unsupported nodes."""
    failure: str
    """The error when the whole graph was opened or run and failed; empty otherwise."""
    untested: int = 0
    """Nodes without a result."""

    @property
    def unsupported_count(self) -> int:
        """Number of nodes known to be off the provider; those without a result do not count."""
        return self.nodes if self.failure else sum(self.unsupported.values())

    @property
    def is_known(self) -> bool:
        """Whether there is a result for any node."""
        return bool(self.failure) or self.untested < self.nodes or not self.nodes


Probe = Callable[[bytes, Mapping[str, tuple[int, ...]]], ProbeResult]
"""Probes a provider with a model without weights, given its input shapes."""


Question = tuple[bytes, Mapping[str, tuple[int, ...]]]
"""A one-node model, and its input shapes."""
NodeSupport = Callable[[Sequence[Question]], Sequence[bool]]
"""Probes a provider with one-node models: whether it supports each node."""


ReplayTarget = Callable[[Path, Manifest], Verification]
"""Replays the known answer of an unpublished package on its target."""
Smoke = Callable[[Path, Manifest], SmokeRecord]
"""Opens an unpublished package and runs a chunk and a token. Raises a PartitaError on failure."""


Unpacks = Callable[[bytes, Mapping[str, tuple[int, ...]]], bool]
"""Whether the provider dequantises the weights of a model in every run, given its input shapes."""


@dataclass(frozen=True, slots=True)
class Target:
    """The provider of the package."""

    provider: str
    source: str
    """The origin of the choice: `--target`, or why it is the default."""
    preferred: str
    """The provider's recorded lowering, probed first."""
    how: str
    """How the provider can be probed: directly, over stub libraries, or not at all and why."""
    ask: Probe | None = None
    """None when it cannot be probed."""
    replay: ReplayTarget | None = None
    """Replays the known answer on it; None when it cannot run here."""
    smoke: Smoke | None = None
    """Opens and runs a package on it; None when it cannot run here."""
    not_here: str = ""
    """Why it cannot run here; empty when it can."""
    by_default: bool = False
    """The user did not choose the provider."""
    rolls: bool = False
    """It is known to support a window cache."""
    constant_defaults: bool = False
    """It treats inputs with defaults as constants."""
    kernels: Kernels = Kernels()
    """Its kernels for quantised weights, as far as known without a probe."""
    unpacks: Unpacks | None = None
    """Detects a provider that dequantises in every run; None where that cannot be tested."""
    supports: NodeSupport | None = None
    """Probes nodes that a pass would write; None when it cannot be probed."""


def candidates(preferred: str, requested: str) -> list[GraphVariant]:
    """Variants to probe: of the requested lowering, else of all by preference, the `preferred` lowering first."""
    if requested != AUTO:
        return [usual(requested)]
    return sorted((usual(each.name) for each in by_preference()), key=lambda variant: variant.attention != preferred)


def instead_of(variant: GraphVariant, answer: ProbeResult, *, has_both: bool) -> GraphVariant | None:
    """The lowering with experts and recurrences in the other form, where it may be better. `has_both`: it exists."""
    if variant.form == "contrib":
        return GraphVariant(variant.attention, "standard") if CONTRIB.intersection(answer.unsupported) else None
    return GraphVariant(variant.attention, "contrib") if has_both else None


def rank(answers: Mapping[GraphVariant, ProbeResult], order: Sequence[GraphVariant]) -> list[GraphVariant]:
    """Variants with results, best first: fewest nodes off the provider, lowering, fewer and larger operators."""
    places = list(dict.fromkeys(variant.attention for variant in order))

    def key(variant: GraphVariant) -> tuple[bool, int, int, bool]:
        answer = answers[variant]
        return not answer.is_known, answer.unsupported_count, places.index(variant.attention), variant.form != "contrib"

    return sorted(answers, key=key)


def target_record(
    target: Target | None, result: Verification | None, how: str | None = None, **found: Any
) -> TargetRecord | None:
    """The manifest record of a target, with `found`; None without one. `result`: of the known answer on it."""
    if target is None:
        return None
    if result is not None:
        found |= {"verification": result.status, "detail": result.detail}
    return TargetRecord(provider=target.provider, source=target.source, probe_method=how or target.how, **found)


def describe(answer: ProbeResult) -> str:
    """`supports 310 of 316 nodes, not GroupQueryAttention (6)`."""
    if answer.failure:
        return f"fails on the whole graph: {answer.failure}"
    off = sum(answer.unsupported.values())
    most_first = sorted(answer.unsupported.items(), key=lambda entry: -entry[1])
    listed = ", ".join(f"{op} ({count})" for op, count in most_first)
    rest = f"; no answer for {answer.untested}" if answer.untested else ""
    taken = answer.nodes - off - answer.untested
    return f"supports {taken} of {answer.nodes} nodes{f', not {listed}' if listed else ''}{rest}"


def skeleton(model: ir.Model) -> bytes:
    """The serialised model with references to a missing file instead of weights."""
    kept: dict[str, ir.TensorProtocol] = {}
    for name, value in model.graph.initializers.items():
        weight = weight_part(value)
        if weight is not None:
            kept[name] = weight
            value.const_value = ir.ExternalTensor(
                "weights", 0, weight.nbytes, weight.dtype, shape=weight.shape, name=name, base_dir=""
            )
    try:
        return bytes(ir.to_proto(model).SerializeToString())
    finally:
        for name, tensor in kept.items():
            model.graph.initializers[name].const_value = tensor
