"""The facts about one node and one provider that does not run it, and the findings common to all reasons.

The basis of a finding is its source. Only `reasons.table` ranks bases and reasons; reasons do not refer to each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partita.diagnosis.inlined_nodes import NODE_GROUP, with_blank
from partita.diagnosis.probe_conclusions import conclusions, opening
from partita.observations.codes import EvidenceKind, ReasonCode
from partita.observations.facts import FAILED, Factor, NodeProbe, RejectedPart
from partita.observations.log_pattern import LogPattern
from partita.observations.names import CPU
from partita.observations.records import ChainEntry

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
MARK = re.compile(r"""\\?[:'"\],;](?![?*{])""")
"""A character in a pattern that always follows a name."""
CONFIRM = "confirm it on a device of this kind: the dry run could not run the changed node"
"""Added to the remedy for a change that was placed but not run."""


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
    is_unnamed: bool = False
    """ONNX Runtime gave it no name, so lines of `log` may have a blank in its place."""
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
    blanks = [blank for pattern in patterns if context.is_unnamed and (blank := with_blank(pattern)) is not None]
    for line in context.log:
        if any(blank.search(line) for blank in blanks):
            yield Finding("logged", "blank_line", line.strip())
            break
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


def name_in(line: str, pattern: LogPattern, name: str) -> bool:
    """Whether the group `node` of `pattern` matches exactly this name in `line`."""
    if NODE_GROUP in pattern.pattern:
        # The name ends at the end of the line if the pattern ends there, at a mark of the pattern, else at a blank or
        # bracket.
        after = pattern.pattern.partition(NODE_GROUP)[2]
        end = r"\s*$" if not after else "" if MARK.match(after) else r"(?![^\s,;)}])"
        exact = pattern.pattern.replace(NODE_GROUP, f"(?P<node>{re.escape(name)}){end}")
        return bool(name) and re.search(exact, line) is not None
    return any(match["node"] == name for match in re.finditer(pattern.pattern, line))
