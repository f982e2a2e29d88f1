"""The wanted provider takes the node only when its sizes are fixed."""

from __future__ import annotations

from partita.diagnosis.reasons.base import STATIC, Context, Finding, Reason, probed, unavailable
from partita.observations.facts import NodeProbe, Trial
from partita.observations.records import ChainEntry


def decide(context: Context) -> Finding | None:
    """Applies when an experiment shows that fixed sizes are all it takes, for the node or for the graph as a whole."""
    return probed(context, "dynamic_shape") or unavailable(context, "dynamic_shape", kind="probed")


REASON = Reason(
    code="dynamic_shape",
    level="node",
    title="Sizes not fixed",
    condition="some size of the node's inputs is symbolic in the model, and with all sizes fixed the provider takes "
    "the node",
    needs="experiments: the node alone is left or fails, and is taken with the sizes of the run and nothing else "
    "changed",
    remedy="fix the sizes of the model's inputs; for a package: export --static-shapes",
    example=Context(
        node="/MatMul",
        op_type="MatMul",
        provider="CPUExecutionProvider",
        wanted=ChainEntry(provider="QNNExecutionProvider", status="active"),
        exported=True,
        replaces=(),
        log=(),
        probe=NodeProbe(
            "/MatMul",
            (
                Trial("as_is", "", "left", ""),
                Trial("static_shape", "all sizes fixed", "taken", ""),
            ),
        ),
    ),
    decide=decide,
    steps=(STATIC,),
)
