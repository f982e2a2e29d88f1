"""The facts about one node and one provider that does not run it, and the findings of reasons.

The basis of a finding is its source. Only `reasons` ranks bases and reasons; reasons do not refer to each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partita.diagnosis.graphs import LAYOUT, MEMCPY_OPS
from partita.diagnosis.probe_conclusions import conclusions, opening
from partita.observations.codes import EvidenceKind, ReasonCode
from partita.observations.facts import FAILED, NEIGHBOURS, OPTION, Factor, NodeProbe, RejectedPart
from partita.observations.names import CPU, UNKNOWN
from partita.observations.patterns import LogPattern
from partita.observations.records import ChainEntry
from partita.observations.text_format import name_some

Basis = str
"""Source of a finding: a key of `GROUNDS`, which describes it."""
GROUNDS: Mapping[Basis, str] = {
    "pin": "a pin covers the node",
    "nowhere": "no source shows the node's provider",
    "line": "a log line names the node",
    "vague_line": "a log line names the node, but not the cause",
    "blank_line": "a log line without the node's name",
    "graph_line": "a log line about the graph",
    "alone": "an experiment on the node in isolation",
    "together": "an experiment with several changes of the node",
    "forms": "experiments with other nodes of the operator",
    "alone_said": "the provider's error for the node in isolation",
    "alone_left": "the provider fails on the graph and does not support the node in isolation",
    "part": "bisection of the graph",
    "budget": "a memory budget, without another cause",
    "origin": "the ONNX file has no such node",
    "entry": "the provider did not start",
    "nothing": "no evidence",
}
NODE_GROUP = r"(?P<node>\S+)"
"""The group for a node's name in most patterns; a real name may contain blanks."""
CONFIRM = "confirm it on a device of this kind: the dry run could not run the changed node"
"""Added to the remedy for a change that was placed but not run."""


ESTIMATE = re.compile(r"Resource estimation for EP '(?P<provider>[^']+)'.*total estimated memory: (?P<bytes>\d+) bytes")
MOST_NAMED = 5
OTHER_OPERATOR = (
    "put a provider that supports the operator first in --provider, or use other operators (for a package: export it "
    "with another --attention)"
)


@dataclass(frozen=True, slots=True)
class Context:
    """The input of a reason: one node, and one preferred provider of the chain that does not run it."""

    node: str
    op_type: str | None
    skipped: ChainEntry
    """The preferred provider that the node is not on."""
    provider: str = CPU
    """The node's provider, by ONNX Runtime's name."""
    is_added: bool = False
    """ONNX Runtime added the node: it is not in the ONNX file and does not replace a node of the file."""
    replaces: tuple[str, ...] = ()
    """File nodes whose work the node does."""
    log: tuple[str, ...] = ()
    """Native log lines that mention the node or one that it replaces."""
    patterns: tuple[LogPattern, ...] = ()
    """Patterns of the skipped provider for `log` and `session_log`; each gives a reason."""
    session_log: tuple[str, ...] = ()
    """Native log lines that match a pattern without a node name; they are about the whole graph."""
    pin: str | None = None
    """The user's pin that covers the node, as written, e.g. cpu:lm_head."""
    probe: NodeProbe | None = None
    """Experiments with the skipped provider on the node, or on a node that it replaces."""
    rejected_part: RejectedPart | None = None
    """The smallest part of the graph that the skipped provider does not open."""
    fails_alone: bool = False
    """The provider fails on a node of that part in isolation."""
    budget: str = ""
    """The user's memory budget for the skipped provider, e.g. cuda.memory_budget_kb=1000."""
    blank_log: str | None = None
    """A native log line about the node with a blank in place of its name: it has none."""
    rewritten_with: tuple[str, ...] = ()
    """File nodes that ONNX Runtime rewrote together when it added this node."""

    @property
    def names(self) -> tuple[str, ...]:
        """The node, and the file nodes that it replaces."""
        return (self.node, *self.replaces)

    @property
    def outcome(self) -> str:
        """Outcome of the unchanged node in isolation; empty without probes."""
        return self.probe.variants[0].outcome if self.probe is not None and self.probe.variants else ""

    @property
    def started(self) -> bool:
        """Whether the skipped provider started and received the graph."""
        return self.skipped.status == "active"


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason applies, with its evidence."""

    kind: EvidenceKind
    basis: Basis
    evidence: str
    remedy: str | None = None
    """Replaces the remedy of the reason; None: the reason's own."""
    factors: tuple[Factor, ...] = ()
    """Changed factors, for evidence from experiments."""
    not_run: bool = False
    """The changed node was placed and not run."""


def common_findings(
    context: Context, code: ReasonCode, entry_kind: EvidenceKind = "logged", factors: Sequence[Factor] = ()
) -> Iterator[Finding]:
    """Findings common to all reasons: the provider's status, log lines about the node, experiments on the node.

    `entry_kind`: kind of the evidence when the provider is unavailable for this reason. `factors`: see
    `isolation_findings`.
    """
    entry = context.skipped
    if not context.started and entry.reason == code and entry.evidence:
        yield Finding(entry_kind, "entry", entry.evidence, entry.remedy)
    yield from line_findings(context, code)
    yield from isolation_findings(context, code, factors)


def line_findings(context: Context, code: ReasonCode) -> Iterator[Finding]:
    """The most specific log line about the node that matches a pattern of `code`, and the first line with a blank name.

    The pattern's group `node` must match a complete name of the node. Empty for a provider that did not start.
    """
    patterns = [pattern for pattern in context.patterns if pattern.reason == code and names_a_node(pattern)]
    if not context.started or not patterns:
        return
    blank = context.blank_log
    if blank and any(known.search(blank) for known in map(with_blank, patterns) if known is not None):
        yield Finding("logged", "blank_line", blank.strip())
    named = (
        (line, pattern)
        for pattern in sorted(patterns, key=lambda pattern: pattern.vague)
        for name in context.names
        for line in context.log
        if name_in(line, pattern, name)
    )
    found = next(named, None)
    if found is not None:
        line, pattern = found
        yield Finding("logged", "vague_line" if pattern.vague else "line", line.strip())


def isolation_findings(context: Context, code: ReasonCode, factors: Sequence[Factor] = ()) -> Iterator[Finding]:
    """A finding when experiments on the node show this reason: by its code, or by a change of one of `factors`.

    For a provider that failed on the graph, the node must be the cause or in the rejected part.
    """
    culprit = is_culprit(context)
    left = rejected_alone(context)
    if not context.started and not culprit and not left and not _rejected_in_part(context):
        return
    for shown in conclusions(context.probe):
        if shown.code == code or any(factor in factors for factor in shown.factors):
            whole = "the provider fails on the whole graph because of this node: " if culprit else ""
            if left and context.rejected_part is not None:
                message = context.rejected_part.message
                whole = f"the provider rejects this node and then fails on the whole graph: {message}; "
            basis: Basis = "forms" if shown.inferred else "together" if len(shown.factors) > 1 else "alone"
            yield Finding("probed", basis, f"{whole}{shown.evidence}", factors=shown.factors, not_run=shown.not_run)
            return


def graph_findings(context: Context, code: ReasonCode) -> Iterator[Finding]:
    """The first line about the whole graph that matches a pattern of `code`. It names no node: a derived finding."""
    for pattern in context.patterns if context.started else ():
        if pattern.reason == code and not names_a_node(pattern):
            line = next((line for line in context.session_log if re.search(pattern.pattern, line)), None)
            if line is not None:
                yield Finding("derived", "graph_line", line.strip())
                return


def is_culprit(context: Context) -> bool:
    """Whether the provider fails on the graph, and on this node of the rejected part in isolation."""
    part = context.rejected_part
    inside = part is not None and not {*part.nodes, *part.rejected_subgraph_nodes}.isdisjoint(context.names)
    return inside and context.outcome in FAILED


def rejected_alone(context: Context) -> bool:
    """Whether the provider fails on a graph because it rejects only this node, and logs the rejection."""
    part, probe = context.rejected_part, context.probe
    single = (
        part is not None
        and len(part.nodes) == 1
        and part.nodes[0] in context.names
        and not part.rejected_subgraph_nodes
    )
    if not single or probe is None or context.outcome != "rejected":
        return False
    message = probe.variants[0].message
    lines = (message, f"{message} node name: {context.node}")  # experiments omit the node name
    return any(re.search(each.pattern, line) for each in context.patterns if names_a_node(each) for line in lines)


def _rejected_in_part(context: Context) -> bool:
    """Whether the provider rejects the node in isolation, and fails on a part with it but on no single node of it.

    For a part of one node: the node is in its control-flow subgraph.
    """
    part = context.rejected_part
    if part is None or context.outcome != "rejected":
        return False
    several = len(part.nodes) > 1 and not set(part.nodes).isdisjoint(context.names) and not context.fails_alone
    return several or not set(part.rejected_subgraph_nodes).isdisjoint(context.names)


def operator_outcome(context: Context, code: ReasonCode) -> str:
    """The outcome of the unchanged node, if the provider's message names the operator and matches a pattern of `code`.

    Empty if no message matches.
    """
    probe = context.probe
    if probe is None or not probe.variants or probe.missing_probes or context.op_type is None:
        return ""
    first = probe.variants[0]
    if first.outcome not in FAILED and context.rejected_part is None:
        return ""
    patterns = [pattern.pattern for pattern in context.patterns if pattern.reason == code]
    named = re.search(rf"\b{re.escape(context.op_type)}\b", first.message)
    return opening(first) if named and any(re.search(pattern, first.message) for pattern in patterns) else ""


def names_a_node(pattern: LogPattern) -> bool:
    """Whether the pattern has the group `node`, so its lines are about one node."""
    return "(?P<node>" in pattern.pattern


def with_blank(pattern: LogPattern) -> re.Pattern[str] | None:
    """The pattern for lines with a blank in place of the name; None if the pattern has no node name."""
    if pattern.pattern.endswith(f" {NODE_GROUP}"):
        return re.compile(pattern.pattern.removesuffix(f" {NODE_GROUP}") + r"\s*$")
    if f" {NODE_GROUP} " in pattern.pattern:
        return re.compile(pattern.pattern.replace(f" {NODE_GROUP} ", " {2,}"))
    return None


def name_in(line: str, pattern: LogPattern, name: str) -> bool:
    """Whether the group `node` of `pattern` matches exactly this name in `line`."""
    if NODE_GROUP in pattern.pattern:
        ends_line = pattern.pattern.endswith(NODE_GROUP)
        end = r"\s*$" if ends_line else r"""(?![^\s'":\],;)}])"""
        exact = pattern.pattern.replace(NODE_GROUP, f"(?P<node>{re.escape(name)}){end}")
        return bool(name) and re.search(exact, line) is not None
    return any(match["node"] == name for match in re.finditer(pattern.pattern, line))


def pinned_by_user(context: Context) -> Iterator[Finding]:
    """A pin covers the node, or the provider logged that an option assigns the node to the CPU."""
    if context.pin is not None:
        yield Finding("derived", "pin", f"--pin {context.pin}")
    yield from line_findings(context, "pinned_by_user")


def runtime_inserted(context: Context) -> Iterator[Finding]:
    """ONNX Runtime inserted the node, as its operator or its neighbours show."""
    inserted = context.op_type in (*MEMCPY_OPS, *LAYOUT) or context.rewritten_with
    if not (context.is_added and context.started and inserted):
        return
    absent = f"the ONNX file has no {context.op_type}"
    if context.rewritten_with:
        rewritten = name_some(context.rewritten_with, 3)
        evidence = f"{absent} here; ONNX Runtime added it when it rewrote {rewritten}"
    else:
        evidence = f"{absent} of this name"
    yield Finding("derived", "origin", evidence)


def over_budget(context: Context) -> Iterator[Finding]:
    """A log line that names the node at which the budget ended, or a budget without another cause.

    There is no other cause when the provider supports the node without a budget, in isolation and with every tested
    neighbour.
    """
    yield from line_findings(context, "over_budget")
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
    yield from (
        finding for finding in isolation_findings(context, "option_needed", (OPTION,)) if finding.basis == "alone"
    )


def no_kernel_op(context: Context) -> Iterator[Finding]:
    """Probes without a supported variant, a log line, or the provider's error on the node in isolation."""
    outcome = operator_outcome(context, "no_kernel_op")
    if outcome:
        yield Finding("probed", "alone_said", outcome, OTHER_OPERATOR)
    for found in isolation_findings(context, "no_kernel_op"):
        basis: Basis = "alone_left" if rejected_alone(context) else found.basis
        yield replace(found, basis=basis, remedy=OTHER_OPERATOR)
    yield from line_findings(context, "no_kernel_op")


def subgraph_rejected(context: Context) -> Iterator[Finding]:
    """The provider failed on the graph or on this node in isolation, or logged that it rejects a part of the graph.

    A node that is not in the file was not rejected: ONNX Runtime added it afterwards.
    """
    if context.rejected_part is not None:
        yield Finding("probed", "part", _whole_graph(context.rejected_part, context))
    if not context.is_added:
        yield from isolation_findings(context, "subgraph_rejected")
        yield from line_findings(context, "subgraph_rejected")
        yield from graph_findings(context, "subgraph_rejected")


def _whole_graph(part: RejectedPart, context: Context) -> str:
    """The result of the bisection, and whether this node is in the part."""
    if part.is_whole_graph and part.untested:
        untested = f"parts of it not tested: {part.untested}"
        return f"the provider opens other graphs and fails on this one: {part.message}; {untested}"
    if part.is_whole_graph:
        return (
            f"the provider opens other graphs and fails on this one, but on no part extracted from it: {part.message}"
        )
    named = name_some(part.nodes, MOST_NAMED)
    fails = "fails with only an added Neg" if part.neg_added else "fails alone"
    size = f"the smallest part that {fails}" if part.minimal else "the smallest failing part found in time"
    if part.minimal and part.untested:
        size += f", of the parts that could be tested ({part.untested}),"
    if part.rejected_subgraph_nodes:
        inner = name_some(part.rejected_subgraph_nodes, MOST_NAMED)
        named += f" (in its control-flow subgraph, {inner} alone fails or is not supported)"
    rest = _rest_of_graph(part)
    shown = next(iter(conclusions(context.probe)), None)
    if shown is not None and is_culprit(context):
        return f"the provider fails on this graph; {size} is {named}; {shown.evidence}{rest}"
    own = not set(part.nodes).isdisjoint(context.names)
    here = "this node is in it" if own else "this node is not in it, but the graph fails as a whole"
    return f"the provider fails on this graph; {size} is {named}: {part.message}; {here}{rest}"


def _rest_of_graph(part: RejectedPart) -> str:
    """The other rejected parts, and whether the provider opens the graph without all of them."""
    others = [name_some(other.nodes, MOST_NAMED) for other in part.other_parts]
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
