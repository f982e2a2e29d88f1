"""The wanted provider can run the node, and did not take it in this graph."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import RETARGET
from partita.observations.facts import NodeProbe, Trial
from partita.observations.records import ChainEntry

REASON = Reason(
    code="not_claimed",
    level="node",
    title="Not claimed in this graph",
    condition="the node alone goes to the provider, and in this graph it does not; nothing that was logged says why",
    needs="an experiment: the node alone, with the same types, shapes and attributes, is taken by the provider",
    remedy="look at the nodes around it: a provider may leave a node whose neighbours it lacks, or a partition that "
    "is too small",
    example=Context(
        node="/Add",
        op_type="Add",
        provider="CPUExecutionProvider",
        skipped=ChainEntry(provider="OpenVINOExecutionProvider", status="active"),
        exported=True,
        replaces=(),
        log=(),
        probe=NodeProbe(
            "/Add",
            (Trial("as_is", "", "taken", ""),),
        ),
    ),
    steps=(RETARGET,),
)
