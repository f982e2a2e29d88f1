"""What there is to go by for one node and one provider that it is not on, and the findings that all reasons have alike.

A finding has a ground: where it comes from. Which ground of which reason goes before which is `precedence`'s alone, so
nothing here, and no reason, knows another reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from partita.diagnosis.inlined_nodes import NODE_GROUP, with_blank
from partita.diagnosis.probe_conclusions import conclusions, opening
from partita.observations.codes import EvidenceKind, ReasonCode
from partita.observations.facts import FAILED, Factor, NodeProbe, RejectedPart
from partita.observations.log_pattern import LogPattern
from partita.observations.names import CPU
from partita.observations.records import ChainEntry

Ground = Literal[
    "pin",
    "nowhere",
    "line",
    "vague_line",
    "blank_line",
    "graph_line",
    "alone",
    "together",
    "forms",
    "alone_said",
    "alone_left",
    "part",
    "budget",
    "origin",
    "entry",
    "nothing",
]
"""Source of a finding; `GROUNDS` describes each."""
GROUNDS: Mapping[Ground, str] = {
    "pin": "a pin covers the node",
    "nowhere": "no source has the node's provider",
    "line": "a log line names the node",
    "vague_line": "a log line names the node, without the detail",
    "blank_line": "a log line with an empty node name",
    "graph_line": "a log line about the graph",
    "alone": "an experiment on the node in isolation",
    "together": "an experiment with several changes of the node",
    "forms": "experiments with other nodes of the operator",
    "alone_said": "the provider's error for the node in isolation",
    "alone_left": "the provider fails on the graph, and does not support the node in isolation",
    "part": "bisection of the graph",
    "budget": "a budget, and no other cause",
    "origin": "the ONNX file has no such node",
    "entry": "the provider did not start",
    "nothing": "no evidence",
}
MARK = re.compile(r"""\\?[:'"\],;](?![?*{])""")
"""What can follow a name in a pattern, and is there always."""
OWN_NAMES = {
    "MemcpyFromHost": re.compile(r"Memcpy(_token_\d+)?"),
    "MemcpyToHost": re.compile(r"Memcpy(_token_\d+)?"),
    "Transpose": re.compile(r"Transpose(_token_\d+)?"),
    "Cast": re.compile(r"InsertedPrecisionFreeCast_.+"),
    "QuantizeLinear": re.compile(r"QuantizeLinear(_token_\d+)?|.+_q(_token_\d+)?"),
    "DequantizeLinear": re.compile(r"DequantizeLinear(_token_\d+)?|.+(_dq|/duplicated)(_token_\d+)?"),
}
"""Names that ONNX Runtime gives to nodes it inserts, by operator."""


PLACED = "place the model on a device of this kind: in a dry run the changed node could not be run"
"""Of a change that is not known to work."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a reason may look at: one node, and one provider of the chain that was preferred and skipped."""

    node: str
    op_type: str | None
    skipped: ChainEntry
    """The preferred provider that the node is not on."""
    provider: str = CPU
    """ONNX Runtime's name of the provider the node is on."""
    exported: bool = True
    """The ONNX file has a node of this name."""
    replaces: tuple[str, ...] = ()
    """File nodes whose work the node does."""
    log: tuple[str, ...] = ()
    """Native log lines that mention the node or one that it replaces."""
    patterns: tuple[LogPattern, ...] = ()
    """How such lines, and those of `session_log`, give a reason away: the skipped provider's patterns."""
    session_log: tuple[str, ...] = ()
    """Native log lines that a pattern without a node's name fits: they are about a whole graph."""
    pin: str | None = None
    """The user's pin that covers the node, as it was written, e.g. cpu:lm_head."""
    probe: NodeProbe | None = None
    """Experiments on the node, or on one that it replaces, on the skipped provider."""
    rejected: RejectedPart | None = None
    """The smallest part of the graph that the skipped provider does not open."""
    fails_alone: bool = False
    """A node of that part makes the provider fail by itself."""
    budget: str = ""
    """The memory budget that the user gave the skipped provider, e.g. cuda.memory_budget_kb=1000."""
    nameless: bool = False
    """ONNX Runtime gave it no name, so that lines of `log` may have a blank in its place."""
    copied_as: tuple[str, ...] = ()
    """Names by which the log has a node in the body of a function that ONNX Runtime unfolded."""
    rewritten_with: tuple[str, ...] = ()
    """Exported nodes that ONNX Runtime rewrote together, and added this node while it did."""

    @property
    def names(self) -> tuple[str, ...]:
        """The node, and those of the file whose work it does."""
        return (self.node, *self.replaces, *self.copied_as)

    @property
    def started(self) -> bool:
        """The skipped provider was there, and looked at the graph."""
        return self.skipped.status == "active"


@dataclass(frozen=True, slots=True)
class Finding:
    """That a reason applies, and what shows it."""

    kind: EvidenceKind
    ground: Ground
    evidence: str
    remedy: str | None = None
    """Only when this case needs another remedy than the reason's own."""
    factors: tuple[Factor, ...] = ()
    """Of experiments: what was changed."""


def usual(
    context: Context, code: ReasonCode, entry_kind: EvidenceKind = "logged", factors: Sequence[Factor] = ()
) -> Iterator[Finding]:
    """What shows any reason: what became of the provider, a line about the node, experiments on the node.

    `entry_kind`: how it is known when a provider is not there for this reason. `factors`: see `alone`.
    """
    entry = context.skipped
    if not context.started and entry.reason == code and entry.evidence:
        yield Finding(entry_kind, "entry", entry.evidence, entry.remedy)
    yield from lines(context, code)
    yield from alone(context, code, factors)


def lines(context: Context, code: ReasonCode) -> Iterator[Finding]:
    """The line about the node that fits a pattern which gives `code`, the most telling one, and the first with a blank
    for its name.

    The pattern's group `node` must be one of the node's names as a whole, not the beginning of a longer one. A provider
    that did not start has looked at no node.
    """
    patterns = [pattern for pattern in context.patterns if pattern.reason == code and names_a_node(pattern)]
    if not context.started or not patterns:
        return
    blanks = [blank for pattern in patterns if context.nameless and (blank := with_blank(pattern)) is not None]
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


def alone(context: Context, code: ReasonCode, factors: Sequence[Factor] = ()) -> Iterator[Finding]:
    """A finding when experiments on the node show this very reason: its code, or a change in one of `factors`.

    They count for a provider that failed over the graph, too, when this node is what it failed over.
    """
    culprit = is_culprit(context)
    left = rejected_alone(context)
    if not context.started and not culprit and not left and not _rejected_in_part(context):
        return
    for shown in conclusions(context.probe):
        if shown.code == code or any(factor in factors for factor in shown.factors):
            whole = "the provider fails on the whole graph because of this node: " if culprit else ""
            if left and context.rejected is not None:
                whole = f"the provider leaves this node and then fails on the whole graph: {context.rejected.message}; "
            ground: Ground = "forms" if shown.inferred else "together" if len(shown.factors) > 1 else "alone"
            remedy = PLACED if shown.not_run else None
            yield Finding("probed", ground, f"{whole}{shown.evidence}", remedy, shown.factors)
            return


def graph_lines(context: Context, code: ReasonCode) -> Iterator[Finding]:
    """The first line about the whole graph that fits a pattern which gives `code`.

    It names no node: that this one is in what it speaks of only follows from where it runs.
    """
    for pattern in context.patterns if context.started else ():
        if pattern.reason == code and not names_a_node(pattern):
            line = next((line for line in context.session_log if re.search(pattern.pattern, line)), None)
            if line is not None:
                yield Finding("derived", "graph_line", line.strip())
                return


def is_culprit(context: Context) -> bool:
    """Whether the provider fails over the graph, and over this very node of it when it is tried by itself."""
    part, probe = context.rejected, context.probe
    inside = part is not None and not {*part.nodes, *part.inside}.isdisjoint(context.names)
    return inside and probe is not None and bool(probe.variants) and probe.variants[0].outcome in FAILED


def rejected_alone(context: Context) -> bool:
    """Whether the provider fails over a graph because it rejects this node and no other, and logs it."""
    part, probe = context.rejected, context.probe
    single = part is not None and len(part.nodes) == 1 and part.nodes[0] in context.names and not part.inside
    if not single or probe is None or not probe.variants or probe.variants[0].outcome != "rejected":
        return False
    lines = (
        probe.variants[0].message,
        f"{probe.variants[0].message} node name: {context.node}",
    )  # cut off in experiments
    return any(re.search(each.pattern, line) for each in context.patterns if names_a_node(each) for line in lines)


def _rejected_in_part(context: Context) -> bool:
    """Whether the node is left when alone, in a part over which the provider fails, and over no node of it alone."""
    part, probe = context.rejected, context.probe
    several = part is not None and len(part.nodes) > 1 and not set(part.nodes).isdisjoint(context.names)
    inside = several and not context.fails_alone
    return inside and probe is not None and bool(probe.variants) and probe.variants[0].outcome == "rejected"


def inserted(context: Context) -> bool:
    """Whether the file has no such node, and that ONNX Runtime added it is clear by its neighbours or its name."""
    name = OWN_NAMES.get(context.op_type or "")
    own = name is not None and name.fullmatch(context.node) is not None
    return not context.exported and (own or bool(context.rewritten_with))


def operator_outcome(context: Context, code: ReasonCode) -> str:
    """What became of the node as it is, where the provider names the operator as it fails and a pattern gives `code`.

    Empty when there is no such line.
    """
    probe = context.probe
    if probe is None or not probe.variants or probe.missing_probes or context.op_type is None:
        return ""
    first = probe.variants[0]
    if first.outcome not in FAILED and context.rejected is None:
        return ""
    patterns = [pattern.pattern for pattern in context.patterns if pattern.reason == code]
    named = re.search(rf"\b{re.escape(context.op_type)}\b", first.message)
    return opening(first) if named and any(re.search(pattern, first.message) for pattern in patterns) else ""


def names_a_node(pattern: LogPattern) -> bool:
    """True when the lines that it fits are about one node."""
    return "(?P<node>" in pattern.pattern


def name_in(line: str, pattern: LogPattern, name: str) -> bool:
    """True when `pattern` finds this very name in `line`."""
    if NODE_GROUP in pattern.pattern:
        # What follows the name ends it: the end of the line where the pattern ends too, a mark that the pattern has
        # there, else a blank or a bracket.
        after = pattern.pattern.partition(NODE_GROUP)[2]
        end = r"\s*$" if not after else "" if MARK.match(after) else r"(?![^\s,;)}])"
        exact = pattern.pattern.replace(NODE_GROUP, f"(?P<node>{re.escape(name)}){end}")
        return bool(name) and re.search(exact, line) is not None
    return any(match["node"] == name for match in re.finditer(pattern.pattern, line))
