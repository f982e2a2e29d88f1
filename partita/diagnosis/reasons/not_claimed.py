"""The preferred provider can run the node, and did not take it in this graph."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import RETARGET
from partita.observations.facts import NodeProbe, ProbeRun
from partita.observations.records import ChainEntry

REASON = Reason(
    code="not_claimed",
    level="node",
    title="Not supported in this graph",
    sentence="{provider} takes {op} alone, and not in this graph",
    condition="the provider supports the node in isolation, but does not take it in this graph, and the log "
    "has no cause",
    needs="an experiment: the provider supports the node in isolation; or it supports a changed node in a "
    "main graph and not in a control-flow subgraph",
    remedy="look at its neighbours: a provider may leave out a node whose neighbours it does not support, or a "
    "partition that "
    "is too small",
    undecided=True,
    example=Context(
        node="/Add",
        op_type="Add",
        skipped=ChainEntry(provider="OpenVINOExecutionProvider", status="active"),
        probe=NodeProbe(
            "/Add",
            (ProbeRun("as_is", "", "supported", ""),),
        ),
    ),
    steps=(RETARGET,),
)
