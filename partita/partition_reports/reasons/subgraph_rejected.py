"""A provider that compiles whole subgraphs did not take the one that the node is in."""

from __future__ import annotations

from partita.partition_reports.facts import LogPattern
from partita.partition_reports.reasons.base import Context, Finding, Reason, about_the_graph, logged
from partita.partition_reports.records import ChainEntry


def decide(context: Context) -> Finding | None:
    """Applies when the provider logged that it rejects this node's subgraph, or takes only a part of the graph.

    A line about the graph names no node: that this node is in what was left over only follows from where it runs.
    """
    if not context.exported:
        return None
    about_node = logged(context, "subgraph_rejected")
    if about_node is not None:
        return about_node
    about_graph = about_the_graph(context, "subgraph_rejected")
    return Finding("derived", about_graph.evidence) if about_graph is not None else None


REASON = Reason(
    code="subgraph_rejected",
    level="node",
    title="Subgraph not taken",
    condition="the wanted provider compiles subgraphs and said that it takes only some of this graph, or none; the log "
    "does not say which node is in the way",
    needs="a native log line in which the provider says how much of the graph it takes, and a node that is elsewhere",
    remedy="look at the nodes at the border of its partitions: one of them, or one of their types, is what it lacks",
    example=Context(
        node="model.layers.0.mlp/Mul",
        op_type="Mul",
        provider="CPUExecutionProvider",
        wanted=ChainEntry(provider="TensorrtExecutionProvider", status="active"),
        exported=True,
        replaces=(),
        log=(),
        patterns=(
            LogPattern(
                "subgraph_rejected", r"(?P<why>\[TensorRT EP\] No graph will run on TensorRT execution provider)"
            ),
        ),
        session_log=(
            "[W:onnxruntime:Default, tensorrt_execution_provider.cc:2790 GetCapability] [TensorRT EP] No graph will "
            "run on TensorRT execution provider",
        ),
    ),
    decide=decide,
)
