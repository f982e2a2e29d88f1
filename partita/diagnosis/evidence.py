"""The facts about one node and one provider that does not run it, and the findings of each source of evidence.

The basis of a finding is its source. Only `reasons` ranks bases and reasons.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from partita.diagnosis.graphs import LAYOUT, MEMCPY_OPS
from partita.diagnosis.probe_conclusions import OTHER_OPERATOR, Finding, conclusions, opening
from partita.observations.codes import EvidenceKind
from partita.observations.facts import FAILED, NEIGHBOURS, OWN_MESSAGES, NodeProbe, RejectedPart
from partita.observations.grouping import grouped
from partita.observations.names import CPU, UNKNOWN
from partita.observations.patterns import LogPattern
from partita.observations.records import ChainEntry
from partita.observations.text_format import name_some

ESTIMATE = re.compile(r"Resource estimation for EP '(?P<provider>[^']+)'.*total estimated memory: (?P<bytes>\d+) bytes")
ENTRY_KINDS: Mapping[str, EvidenceKind] = {
    "not_in_build": "derived",
    "duplicate_runtime": "derived",
    "dynamic_shape": "probed",
}
"""Kind of the evidence when a provider is unavailable for a reason, if it is not a log line."""
MOST_NAMED = 5


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
    message_patterns: tuple[LogPattern, ...] = ()
    """Patterns of the skipped provider for its message in `probe`."""
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


def all_findings(context: Context) -> Iterator[Finding]:
    """Every finding of every source, without an order; at most one for each code and basis."""
    entry = context.skipped
    if context.pin is not None:
        yield Finding("pinned_by_user", "derived", "pin", f"--pin {context.pin}")
    if not context.started and entry.reason and entry.reason != "subgraph_rejected" and entry.evidence:
        yield Finding(entry.reason, ENTRY_KINDS.get(entry.reason, "logged"), "entry", entry.evidence, entry.remedy)
    if context.started:
        yield from _inserted(context)
        yield from _over_budget(context)
        yield from _log_lines(context)
    if outcome := _operator_outcome(context):
        yield Finding("no_kernel_op", "probed", "alone_said", outcome, OTHER_OPERATOR)
    if context.rejected_part is not None:
        yield Finding("subgraph_rejected", "probed", "part", _whole_graph(context.rejected_part, context))
    yield from _message(context)
    yield from _experiments(context)
    yield _unexplained(context)


def _inserted(context: Context) -> Iterator[Finding]:
    """ONNX Runtime inserted the node, as its operator or its neighbours show."""
    if not context.is_added or not (context.rewritten_with or context.op_type in MEMCPY_OPS | LAYOUT):
        return
    rewritten = f"here; ONNX Runtime added it when it rewrote {name_some(context.rewritten_with, 3)}"
    where = rewritten if context.rewritten_with else "of this name"
    yield Finding("runtime_inserted", "derived", "origin", f"the ONNX file has no {context.op_type} {where}")


def _over_budget(context: Context) -> Iterator[Finding]:
    """A budget without another cause: without it, the provider supports the node, also with every tested neighbour."""
    probe, shown = context.probe, next(iter(conclusions(context.probe)), None)
    if not context.budget or probe is None or context.outcome != "supported" or shown is None:
        return
    together = any(trial.factor == NEIGHBOURS and trial.outcome == "rejected" for trial in probe.variants)
    if shown.code == "not_claimed" and not together:
        found = (match for line in context.session_log if (match := ESTIMATE.search(line)))
        own = next((match["bytes"] for match in found if match["provider"] == context.skipped.provider), "")
        estimate = f"; ONNX Runtime's estimate for the nodes assigned to it: {int(own):,} bytes" if own else ""
        evidence = f"{context.budget}{estimate}; {shown.evidence} without a budget"
        yield Finding("over_budget", "probed", "budget", evidence)


def _log_lines(context: Context) -> Iterator[Finding]:
    """For each reason the most specific log line about the node, and the first line with a blank in place of its name.

    The pattern's group `node` must match a complete name of the node. Patterns without that group are about the whole
    graph. A node that is not in the file was not rejected with a part of it: ONNX Runtime added it afterwards.
    """
    blank, ranked = context.blank_log or "", sorted(context.patterns, key=lambda pattern: pattern.vague)
    known = (each for each in ranked if not (context.is_added and each.reason == "subgraph_rejected"))
    by_code = grouped(known, lambda pattern: pattern.reason)
    for code, patterns in by_code.items():
        if blank and any(each.search(blank) for pattern in patterns if (each := pattern.with_blank) is not None):
            yield Finding(code, "logged", "blank_line", blank.strip())
        named = (
            Finding(code, "logged", "vague_line" if pattern.vague else "line", line.strip())
            for pattern in patterns
            if pattern.names_node
            for name in context.names
            for line in context.log
            if pattern.is_about(line, name)
        )
        yield from itertools.islice(named, 1)
    unnamed = [each.pattern for each in by_code.get("subgraph_rejected", ()) if not each.names_node]
    about_graph = (line for each in unnamed for line in context.session_log if re.search(each, line))
    for line in itertools.islice(about_graph, 1):
        yield Finding("subgraph_rejected", "derived", "graph_line", line.strip())


def _experiments(context: Context) -> Iterator[Finding]:
    """For each reason the first finding from experiments on the node.

    For a provider that failed on the graph, the node must be the cause or in the rejected part.
    """
    role, part, whole = _role(context), context.rejected_part, ""
    if not (context.started or role):
        return
    if role == "culprit":
        whole = "the provider fails on the whole graph because of this node: "
    if role == "rejected" and part is not None:
        whole = f"the provider rejects this node and then fails on the whole graph: {part.message}; "
    first = {found.code: found for found in reversed(conclusions(context.probe))}
    for code, found in first.items():
        basis = "alone_left" if role == "rejected" and code == "no_kernel_op" else found.basis
        if not (context.is_added and code == "subgraph_rejected"):
            yield replace(found, basis=basis, evidence=f"{whole}{found.evidence}")


def _role(context: Context) -> Literal["culprit", "rejected", "in_part", ""]:
    """The role of the node in the part of the graph on which the provider fails.

    culprit: it fails on the node in isolation. rejected: it rejects only this node, and logs the rejection. in_part: it
    rejects the node in isolation, and fails on a part with it but on no single node of it; for a part of one node, the
    node is in its control-flow subgraph.
    """
    part, probe = context.rejected_part, context.probe
    if part is None or probe is None:
        return ""
    own = not set(part.nodes).isdisjoint(context.names)
    inside = not set(part.rejected_subgraph_nodes).isdisjoint(context.names)
    if context.outcome in FAILED and (own or inside):
        return "culprit"
    if context.outcome != "rejected":
        return ""
    if own and len(part.nodes) == 1 and not part.rejected_subgraph_nodes:
        message = probe.variants[0].message
        lines = (message, f"{message} node name: {context.node}")  # experiments omit the node name
        patterns = [each.pattern for each in context.patterns if each.names_node]
        return "rejected" if any(re.search(pattern, line) for pattern in patterns for line in lines) else ""
    several = own and len(part.nodes) > 1 and not context.fails_alone
    return "in_part" if several or inside else ""


def _operator_outcome(context: Context) -> str:
    """The outcome of the unchanged node, if the provider's message matches a pattern of no_kernel_op with its operator.

    Empty if no message does.
    """
    probe = context.probe
    if probe is None or not probe.variants or probe.missing_probes or context.op_type is None:
        return ""
    first = probe.variants[0]
    if first.outcome not in FAILED and context.rejected_part is None:
        return ""
    patterns = [pattern.pattern for pattern in context.patterns if pattern.reason == "no_kernel_op"]
    named = re.search(rf"\b{re.escape(context.op_type)}\b", first.message)
    return opening(first) if named and any(re.search(pattern, first.message) for pattern in patterns) else ""


def _message(context: Context) -> Iterator[Finding]:
    """The reason in the provider's message about the unchanged node, where the experiments show only no support."""
    first = context.probe.variants[0] if context.probe is not None and context.outcome == "rejected" else None
    shown = next(iter(conclusions(context.probe)), None)
    if first is None or first.message.startswith(OWN_MESSAGES) or (shown and shown.code != "no_kernel_op"):
        return
    found = (each.reason for each in context.message_patterns if re.search(each.pattern, first.message))
    if (code := next(found, None)) is not None and code != "no_kernel_op":
        yield Finding(code, "probed", "alone_said", opening(first))


def _whole_graph(part: RejectedPart, context: Context) -> str:
    """The result of the bisection, and whether this node is in the part."""
    if part.is_whole_graph:
        start = "the provider opens other graphs and fails on this one"
        if part.untested:
            return f"{start}: {part.message}; parts of it not tested: {part.untested}"
        return f"{start}, but on no part extracted from it: {part.message}"
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
    if shown is not None and _role(context) == "culprit":
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


def _unexplained(context: Context) -> Finding:
    """The finding that applies to every node, after all others."""
    entry, missing = context.skipped, context.probe.missing_probes if context.probe is not None else ""
    if not context.started:
        evidence = entry.evidence or f"{entry.provider} is unavailable ({entry.reason})"
        return Finding("unexplained", "none", "nothing", evidence, entry.remedy)
    if context.provider == UNKNOWN:
        return Finding("unexplained", "none", "nowhere", "no source shows where this node runs")
    evidence = f"no source shows why the node is not on the preferred provider{missing and f'; experiments: {missing}'}"
    return Finding("unexplained", "none", "nothing", evidence)
