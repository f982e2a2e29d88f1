"""The preferred provider takes the node only when its sizes are fixed."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import STATIC
from partita.observations.facts import NodeProbe, ProbeRun
from partita.observations.records import ChainEntry

DECLARE = (
    "if what the node makes always has the same sizes, declare them in the file (value_info, or the type of the output "
    "of the graph); else only a provider that takes sizes which depend on values can run it"
)
RANKS = (
    "declare in the file how many dimensions the model's inputs have, or what the node reads (value_info); the sizes "
    "may stay open"
)
REASON = Reason(
    code="dynamic_shape",
    level="node",
    title="Shapes not static",
    sentence="{provider} does not take {op} with sizes that are not fixed",
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
