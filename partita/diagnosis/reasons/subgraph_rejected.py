"""A compiling provider rejected the subgraph that the node is in."""

from __future__ import annotations

from collections.abc import Iterator

from partita.diagnosis.evidence import Context, Finding, alone, graph_lines, is_culprit, lines
from partita.diagnosis.probe_conclusions import conclusions
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import RETARGET, STANDARD
from partita.observations.facts import RejectedPart
from partita.observations.log_pattern import LogPattern
from partita.observations.records import ChainEntry
from partita.observations.text_format import name_some

MOST_NAMED = 5


def find(context: Context) -> Iterator[Finding]:
    """The provider failed on the graph or on this node in isolation, or logged that it rejects a part of the graph.

    A node that is not in the file was not rejected: ONNX Runtime added it afterwards.
    """
    if context.rejected is not None:
        yield Finding("probed", "part", _whole_graph(context.rejected, context))
    if context.exported or context.replaces:
        yield from alone(context, "subgraph_rejected")
        yield from lines(context, "subgraph_rejected")
        yield from graph_lines(context, "subgraph_rejected")


def _whole_graph(part: RejectedPart, context: Context) -> str:
    """The result of the bisection, and whether this node is in the part."""
    if part.is_whole_graph and part.untested:
        untested = f"parts of it not tested: {part.untested}"
        return f"the provider opens other graphs and fails on this one: {part.message}; {untested}"
    if part.is_whole_graph:
        return (
            f"the provider opens other graphs and fails on this one, but on no part extracted from it: {part.message}"
        )
    more = len(part.nodes) - MOST_NAMED
    named = ", ".join(part.nodes[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    fails = "fails with only an added Neg" if part.neg_added else "fails alone"
    size = f"the smallest part that {fails}" if part.minimal else "the smallest failing part found in time"
    if part.minimal and part.untested:
        size += f", of the parts that could be tested ({part.untested}),"
    if part.rejected_subgraph_nodes:
        named += f" (in its control-flow subgraph {name_some(part.rejected_subgraph_nodes, MOST_NAMED)} fails, too)"
    rest = _rest_of_graph(part)
    shown = next(iter(conclusions(context.probe)), None)
    if shown is not None and is_culprit(context):
        return f"the provider fails on this graph; {size} is {named}; {shown.evidence}{rest}"
    own = not set(part.nodes).isdisjoint(context.names)
    here = "this node is in it" if own else "this node is not in it, but the graph fails as a whole"
    return f"the provider fails on this graph; {size} is {named}: {part.message}; {here}{rest}"


def _rest_of_graph(part: RejectedPart) -> str:
    """The other rejected parts, and whether the provider opens the graph without all of them."""
    others = [", ".join(other.nodes[:MOST_NAMED]) for other in part.others]
    also = f"; other parts that fail: {'; '.join(others)}" if others else ""
    if part.rest_opens:
        return f"{also}; the provider opens the graph without {'these parts' if others else 'this part'}"
    return f"{also}; whether the graph has {'more' if others else 'other'} failing parts is unknown"


REASON = Reason(
    code="subgraph_rejected",
    level="node",
    title="Subgraph rejected",
    sentence="{provider} fails on {op} or on the part of the graph that contains it",
    condition="the provider fails on the graph or on the node, or it compiles subgraphs and rejects all or part of "
    "the graph",
    needs="bisection to the smallest part of the graph that fails; an experiment in which the provider fails or "
    "crashes on the node; or a log line about the subgraphs that the provider compiles",
    remedy="change the nodes that the evidence names, or run them on another provider; if it names none, check the "
    "nodes at the boundaries of the provider's partitions for unsupported operators and types",
    undecided=True,
    example=Context(
        node="model.layers.0.mlp/Mul",
        op_type="Mul",
        skipped=ChainEntry(provider="TensorrtExecutionProvider", status="active"),
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
    find=find,
    found_on=("part", "alone", "line", "blank_line", "graph_line"),
    steps=(RETARGET, STANDARD),
)
