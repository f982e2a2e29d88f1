"""The preferred provider supports the node only with fixed sizes or known ranks."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import STATIC
from partita.observations.facts import NodeProbe, ProbeRun
from partita.observations.records import ChainEntry

DECLARE = (
    "if the outputs of the node always have the same sizes, declare them in the file (value_info, or the type of the "
    "graph output); otherwise use a provider that supports sizes that depend on values"
)
RANKS = (
    "declare in the file the ranks of the model's inputs, or of the inputs of the node (value_info); sizes may stay "
    "symbolic"
)
REASON = Reason(
    code="dynamic_shape",
    level="node",
    title="Dynamic shapes not supported",
    sentence="{provider} does not support {op} with dynamic sizes",
    condition="the provider supports the node only with static shapes, or with known ranks",
    needs="experiments: the provider supports the node with the sizes or ranks of the run and no other change",
    remedy="make the shapes of the model's inputs static; for a package: export --static-shapes",
    factors=("rank", "static_shape", "output_shape"),
    remedies={"rank": RANKS, "output_shape": DECLARE},
    example=Context(
        node="/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(provider="QNNExecutionProvider", status="active"),
        probe=NodeProbe(
            "/MatMul",
            (
                ProbeRun("as_is", "", "rejected", ""),
                ProbeRun("static_shape", "all sizes fixed", "supported", ""),
            ),
        ),
    ),
    entry_kind="probed",
    loses_provider=True,
    steps=(STATIC,),
)
