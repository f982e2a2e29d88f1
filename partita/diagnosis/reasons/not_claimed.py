"""The preferred provider supports the node in isolation, but not in this graph."""

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
    sentence="{provider} supports {op}, but not in this graph",
    condition="the provider supports the node in isolation, or with other types of its neighbours, but is not "
    "assigned the node in this graph, and the log names no cause",
    needs="an experiment: the provider supports the node in isolation, or in its quantised group with another type; "
    "or it supports a changed node in the main graph, but not in a control-flow subgraph",
    remedy="check its neighbours: a provider may skip a node whose neighbours it does not support, or a partition "
    "that is too small",
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
