"""Findings of the reasons whose evidence is more than `evidence.usual`: a function for each, named for its code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from partita.diagnosis.evidence import (
    Basis,
    Context,
    Finding,
    alone,
    graph_lines,
    inserted,
    is_culprit,
    lines,
    operator_outcome,
    rejected_alone,
)
from partita.diagnosis.probe_conclusions import conclusions
from partita.observations.facts import NEIGHBOURS, OPTION, RejectedPart
from partita.observations.names import UNKNOWN
from partita.observations.text_format import name_some

ESTIMATE = re.compile(r"Resource estimation for EP '(?P<provider>[^']+)'.*total estimated memory: (?P<bytes>\d+) bytes")
MOST_NAMED = 5
OTHER_OPERATOR = (
    "put a provider that supports the operator first in --provider, or use other operators (for a package: export it "
    "with another --attention)"
)


def not_in_build(context: Context) -> Iterator[Finding]:
    """The provider is unavailable for this reason; the default evidence is its absence from the list."""
    entry = context.skipped
    if not context.started and entry.reason == "not_in_build":
        evidence = entry.evidence or f"{entry.provider} is not among the providers of this build"
        yield Finding("derived", "entry", evidence, entry.remedy)


def pinned_by_user(context: Context) -> Iterator[Finding]:
    """A pin covers the node, or the provider logged that an option assigns the node to the CPU."""
    if context.pin is not None:
        yield Finding("derived", "pin", f"--pin {context.pin}")
    yield from lines(context, "pinned_by_user")


def runtime_inserted(context: Context) -> Iterator[Finding]:
    """The file has no such node, and its neighbours or its name show that ONNX Runtime inserted it."""
    if not inserted(context) or not context.started:
        return
    absent = f"the ONNX file has no {context.op_type}"
    if context.rewritten_with:
        rewritten = name_some(context.rewritten_with, 3)
        evidence = f"{absent} here; ONNX Runtime added it when it rewrote {rewritten}"
    else:
        evidence = f"{absent} of this name; its name has the form of nodes that ONNX Runtime inserts"
    yield Finding("derived", "origin", evidence)


def over_budget(context: Context) -> Iterator[Finding]:
    """A log line that names the node at which the budget ended, or a budget without another cause.

    There is no other cause when the provider supports the node without a budget, in isolation and with every tested
    neighbour.
    """
    yield from lines(context, "over_budget")
    supported = next((shown for shown in conclusions(context.probe) if shown.accepted), None)
    with_neighbours = [trial for trial in context.probe.variants if trial.factor == NEIGHBOURS] if context.probe else []
    rejected_together = any(trial.outcome == "rejected" for trial in with_neighbours)
    if context.budget and context.started and supported is not None and not rejected_together:
        evidence = f"{context.budget}{_estimate(context)}; {supported.evidence} without a budget"
        yield Finding("probed", "budget", evidence)


def _estimate(context: Context) -> str:
    """ONNX Runtime's memory estimate for the nodes assigned to the provider; empty if the log has none."""
    for line in context.session_log:
        match = ESTIMATE.search(line)
        if match is not None and match["provider"] == context.skipped.provider:
            return f"; ONNX Runtime's estimate for the nodes assigned to it: {int(match['bytes']):,} bytes"
    return ""


def option_needed(context: Context) -> Iterator[Finding]:
    """An experiment in which only a provider option was changed."""
    yield from (finding for finding in alone(context, "option_needed", (OPTION,)) if finding.basis == "alone")


def no_kernel_op(context: Context) -> Iterator[Finding]:
    """Probes without a supported variant, a log line, or the provider's error on the node in isolation."""
    outcome = operator_outcome(context, "no_kernel_op")
    if outcome:
        yield Finding("probed", "alone_said", outcome, OTHER_OPERATOR)
    for found in alone(context, "no_kernel_op"):
        basis: Basis = "alone_left" if rejected_alone(context) else found.basis
        yield replace(found, basis=basis, remedy=OTHER_OPERATOR)
    yield from lines(context, "no_kernel_op")


def subgraph_rejected(context: Context) -> Iterator[Finding]:
    """The provider failed on the graph or on this node in isolation, or logged that it rejects a part of the graph.

    A node that is not in the file was not rejected: ONNX Runtime added it afterwards.
    """
    if context.rejected_part is not None:
        yield Finding("probed", "part", _whole_graph(context.rejected_part, context))
    if context.is_in_file or context.replaces:
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


def unexplained(context: Context) -> Iterator[Finding]:
    """Applies to every node, after every other reason."""
    entry = context.skipped
    if not context.started:
        evidence = entry.evidence or f"{entry.provider} is unavailable ({entry.reason})"
        yield Finding("none", "nothing", evidence, entry.remedy)
    elif context.provider == UNKNOWN:
        yield Finding("none", "nowhere", "no source shows where this node runs")
    else:
        missing = (
            f"; experiments: {context.probe.missing_probes}"
            if context.probe is not None and context.probe.missing_probes
            else ""
        )
        yield Finding("none", "nothing", f"no source shows why the node is not on the preferred provider{missing}")
