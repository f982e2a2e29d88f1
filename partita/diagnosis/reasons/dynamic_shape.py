"""The wanted provider takes the node only when its sizes are fixed."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import STATIC
from partita.observations.facts import NodeProbe, Trial
from partita.observations.records import ChainEntry

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
        skipped=ChainEntry(provider="QNNExecutionProvider", status="active"),
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
    entry_kind="probed",
    steps=(STATIC,),
)
