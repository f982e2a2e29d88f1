"""Closed sets of codes: reasons, kinds of evidence, interruptions."""

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
"""Reasons why a provider is unavailable."""
NodeCode = Literal[
    "pinned_by_user",
    "runtime_inserted",
    "over_budget",
    "option_needed",
    "dynamic_shape",
    "no_kernel_type",
    "no_kernel_version",
    "attribute_unsupported",
    "no_kernel_op",
    "subgraph_rejected",
    "cpu_preferred",
    "not_claimed",
    "unexplained",
]
"""Reasons why a node is not on an available provider, in the order of precedence where the evidence is of one kind."""
ReasonCode = ProviderCode | NodeCode
PROVIDER_CODES: tuple[ProviderCode, ...] = get_args(ProviderCode)
NODE_CODES: tuple[NodeCode, ...] = get_args(NodeCode)
CODES: tuple[ReasonCode, ...] = (*PROVIDER_CODES, *NODE_CODES)
EvidenceKind = Literal["logged", "probed", "derived", "none"]
"""logged: a log line of ONNX Runtime or the provider. probed: a probe. derived: inferred from other facts."""
Interruption = Literal["runs", "experiments"]
"""Work other than a generation that Ctrl-C can stop: session runs of `place`, probes of fallback nodes."""
