"""Closed vocabularies: every reason that a report, a log pattern or an error may carry, and what was cut short."""

from __future__ import annotations

from typing import Literal, get_args

ProviderCode = Literal[
    "not_in_build",
    "library_missing",
    "device_missing",
    "version_mismatch",
    "duplicate_runtime",
    "option_rejected",
    "initialisation_failed",
]
"""Why a provider is not there at all."""
NodeCode = Literal[
    "pinned_by_user",
    "runtime_inserted",
    "over_budget",
    "option_needed",
    "no_kernel_type",
    "no_kernel_version",
    "attribute_unsupported",
    "dynamic_shape",
    "no_kernel_op",
    "subgraph_rejected",
    "cpu_preferred",
    "not_claimed",
    "unexplained",
]
"""Why a node is not on a provider that is there."""
ReasonCode = ProviderCode | NodeCode
PROVIDER_CODES: tuple[ProviderCode, ...] = get_args(ProviderCode)
NODE_CODES: tuple[NodeCode, ...] = get_args(NodeCode)
EvidenceKind = Literal["logged", "probed", "derived", "none"]
"""Logged: ONNX Runtime or the provider said so. Probed: an experiment shows it. Derived: it follows."""
Interruption = Literal["runs", "experiments"]
"""What Ctrl-C can cut short beside a generation: the session runs of `place`, experiments on nodes that fell back."""
