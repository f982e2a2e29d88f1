"""The memory budget that the user gave the provider was spent before it came to this node."""

from __future__ import annotations

from partita.partition_reports.facts import LogPattern
from partita.partition_reports.reasons.base import Context, Finding, Reason, logged
from partita.partition_reports.records import ChainEntry


def decide(context: Context) -> Finding | None:
    """Applies when the log says that the budget ended at this node."""
    return logged(context, "over_budget")


REASON = Reason(
    code="over_budget",
    level="node",
    title="Over the memory budget",
    condition="the user gave the provider a budget of device memory, and it was spent",
    needs="a native log line that says at which node the budget ended",
    remedy="give it a larger budget, or none",
    example=Context(
        node="model.layers.7.mlp.up_proj/MatMul",
        op_type="MatMul",
        provider="CPUExecutionProvider",
        wanted=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        exported=True,
        replaces=(),
        log=(
            "[W:onnxruntime:, graph_partitioner.cc:520 operator()] CUDAExecutionProvider halting assignment due to "
            "budget at node: model.layers.7.mlp.up_proj/MatMul",
        ),
        patterns=(LogPattern("over_budget", r"halting assignment due to budget at node: (?P<node>\S+)"),),
    ),
    decide=decide,
)
