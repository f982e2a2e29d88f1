"""The preferred provider supports the operator, but not with the element types of this node."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import HALF, RETARGET, SINGLE
from partita.observations.facts import NodeProbe, ProbeRun
from partita.observations.records import ChainEntry

REASON = Reason(
    code="no_kernel_type",
    level="node",
    title="No kernel for the type",
    sentence="{provider} has no {before} kernel for {op}",
    condition="the provider supports the operator, but not with the node's element types",
    needs="experiments: the provider supports the node with another element type, or supports other nodes "
    "of the operator only in other types",
    remedy="use an element type that the provider supports (for a package: export it with another --precision "
    "or --attention); the evidence names types that work",
    factors=("type",),
    example=Context(
        node="model.layers.0.self_attn/GroupQueryAttention",
        op_type="GroupQueryAttention",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        probe=NodeProbe(
            "model.layers.0.self_attn/GroupQueryAttention",
            (
                ProbeRun("as_is", "", "rejected", ""),
                ProbeRun("type", "float16 in place of float32", "supported", ""),
                ProbeRun("opset", "an older one", "rejected", ""),
            ),
        ),
    ),
    steps=(
        RETARGET,
        HALF,
        SINGLE,
    ),
)
