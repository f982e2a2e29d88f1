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
    """The provider failed over the graph or over this node alone, or logged that it rejects a part.

    What is not in the file was not rejected: ONNX Runtime made it afterwards.
    """
    if context.rejected is not None:
        yield Finding("probed", "part", _whole_graph(context.rejected, context))
    if context.exported or context.replaces:
        yield from alone(context, "subgraph_rejected")
        yield from lines(context, "subgraph_rejected")
        yield from graph_lines(context, "subgraph_rejected")


def _whole_graph(part: RejectedPart, context: Context) -> str:
    """What bisection found, and whether this node is in it."""
    if part.whole and part.untested:
        untried = f"parts of it not tried: {part.untested}"
        return f"the provider opens other graphs and fails over this one: {part.message}; {untried}"
    if part.whole:
        return (
            f"the provider loads other graphs and fails on this one, but on no part extracted from it: {part.message}"
        )
    more = len(part.nodes) - MOST_NAMED
    named = ", ".join(part.nodes[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    fails = "fails with only an added Neg" if part.neg_added else "fails alone"
    size = f"the smallest part that {fails}" if part.minimal else "the smallest failing part found in time"
    if part.minimal and part.untested:
        size += f", of the parts that could be tried ({part.untested}),"
    if part.inside:
        named += f", as does {name_some(part.inside, MOST_NAMED)} in a control-flow subgraph of it"
    named += _rest_of_graph(part)
    shown = next(iter(conclusions(context.probe)), None)
    if shown is not None and is_culprit(context):
        return f"the provider fails on this graph; {size} is {named}; {shown.evidence}"
    own = not set(part.nodes).isdisjoint(context.names)
    here = "this node is in it" if own else "the graph fails as a whole, this node with it"
    return f"the provider fails on this graph; {size} is {named}: {part.message}; {here}"


def _rest_of_graph(part: RejectedPart) -> str:
    """What is known of the graph without the part."""
    others = [", ".join(other.nodes[:MOST_NAMED]) for other in part.others]
    also = f", besides {'; '.join(others)}, which fail without it" if others else ""
    if part.rest_opens:
        return f"{also}, and the provider opens the graph without {'them' if others else 'it'}"
    return f"{also}, and it is not known whether the graph has {'more' if others else 'others'}"


REASON = Reason(
    code="subgraph_rejected",
    level="node",
    title="Subgraph rejected",
    sentence="{provider} fails on {op}, or on the part of the graph that it is in",
    condition="the provider fails on the graph or the node, or it compiles subgraphs and rejected part of the "
    "graph or all of it",
    needs="bisection to the smallest part that the provider does not load; an experiment in which it "
    "fails or crashes on the node; or a log line about how much of the graph it takes",
    remedy="change the nodes that the evidence names, or run them on another provider; where it names none, look for "
    "an operator or a type that is not supported at the boundary of the provider's partitions",
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
