"""A provider that compiles whole subgraphs did not take the one that the node is in."""

from __future__ import annotations

from partita.diagnosis.probe_verdict import conclude
from partita.diagnosis.reasons.base import (
    FINER,
    RETARGET,
    STANDARD,
    Context,
    Finding,
    Reason,
    about_the_graph,
    is_culprit,
    logged,
    probed,
    said_of_operator,
)
from partita.observations.facts import RejectedPart
from partita.observations.log_pattern import LogPattern
from partita.observations.records import ChainEntry

MOST_NAMED = 5


def decide(context: Context) -> Finding | None:
    """Applies when the provider failed over the graph or over this node alone, or logged that it rejects a part.

    A line about the graph names no node: that this node is in what was left over only follows from where it runs.
    """
    if said_of_operator(context) and (context.rejected is None or context.node in context.rejected.nodes):
        return None
    if context.rejected is not None:
        shown = conclude(context.probe)
        finer = shown is not None and shown.code in FINER and is_culprit(context)
        return None if finer else Finding("probed", whole_graph(context.rejected, context))
    if not context.exported:
        return None
    alone = probed(context, "subgraph_rejected")
    if alone is not None:
        return alone
    about_node = logged(context, "subgraph_rejected")
    if about_node is not None:
        return about_node
    about_graph = about_the_graph(context, "subgraph_rejected")
    return Finding("derived", about_graph.evidence) if about_graph is not None else None


def whole_graph(part: RejectedPart, context: Context) -> str:
    """What bisection found, and whether this node is in it."""
    if part.whole:
        return f"the provider opens other graphs and fails over this one, but over no part cut out of it: {part.said}"
    more = len(part.nodes) - MOST_NAMED
    named = ", ".join(part.nodes[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    size = "the smallest part that fails alone" if part.minimal else "the smallest failing part found in time"
    shown = conclude(context.probe)
    if shown is not None and is_culprit(context):
        return f"the provider fails over this graph; {size} is {named}; {shown.evidence}"
    here = "this node is in it" if context.node in part.nodes else "the graph fails as a whole, this node with it"
    return f"the provider fails over this graph; {size} is {named}: {part.said}; {here}"


REASON = Reason(
    code="subgraph_rejected",
    level="node",
    title="Subgraph not taken",
    condition="the wanted provider fails over the graph or over the node itself, or it compiles subgraphs and said "
    "that it takes only some of this graph, or none",
    needs="bisection that ends at the smallest part that the provider does not open, of a graph over which it fails "
    "while it opens others; or an experiment in which the node alone makes it fail or crash; or a native log line in "
    "which it says how much of the graph it takes, from which it only follows that this node is in the rest",
    remedy="change the node or the few nodes that the evidence names, or put them on another provider; where it names "
    "none, look at the nodes at the border of the provider's partitions: one of them, or one of their types, is what "
    "it lacks",
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
    steps=(RETARGET, STANDARD),
)
