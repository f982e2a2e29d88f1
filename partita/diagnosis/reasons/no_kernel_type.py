"""The wanted provider has the operator, but not for the types of this node."""

from __future__ import annotations

from partita.diagnosis.reasons.base import HALF, RETARGET, SINGLE, Context, Finding, Reason, probed
from partita.observations.facts import NodeProbe, Trial
from partita.observations.records import ChainEntry


def decide(context: Context) -> Finding | None:
    """Applies when an experiment shows that another element type is all it takes."""
    return probed(context, "no_kernel_type")


REASON = Reason(
    code="no_kernel_type",
    level="node",
    title="No kernel for the type",
    condition="the provider takes the same node with another element type, and does not take it with its own",
    needs="experiments: the node alone is left or fails, and is taken with another element type and nothing else "
    "changed",
    remedy="give the node a type that the provider has: for a package, export with another --precision or "
    "--attention; the evidence names the types that work",
    example=Context(
        node="model.layers.0.self_attn/GroupQueryAttention",
        op_type="GroupQueryAttention",
        provider="CPUExecutionProvider",
        wanted=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        exported=True,
        replaces=(),
        log=(),
        probe=NodeProbe(
            "model.layers.0.self_attn/GroupQueryAttention",
            (
                Trial("as_is", "", "left", ""),
                Trial("type", "float16 in place of float32", "taken", ""),
                Trial("opset", "an older one", "left", ""),
            ),
        ),
    ),
    decide=decide,
    steps=(
        RETARGET,
        HALF,
        SINGLE,
    ),
)
