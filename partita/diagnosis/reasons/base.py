"""The reason record: one reason code, when it applies, what proves it, and what to do.

One file per code in this folder exposes `REASON`; the file name is the code. To decide on a node every reason is asked,
and the finding with the strongest evidence wins, so a new file needs no place in any list. Knows nothing of the
report's shape beyond the chain entry.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from partita.diagnosis.inlined_nodes import NODE_GROUP, with_blank
from partita.diagnosis.probe_verdict import conclude
from partita.observations.facts import FAILED, NodeProbe, RejectedPart
from partita.observations.log_pattern import LogPattern
from partita.observations.records import ChainEntry
from partita.remedies import Remedy

EvidenceKind = Literal["logged", "probed", "derived", "none"]
STRENGTH: tuple[EvidenceKind, ...] = ("logged", "probed", "derived", "none")
"""Strongest first. Logged: ONNX Runtime or the EP said so; probed: an experiment shows it; derived: it follows."""
FINER = frozenset({"no_kernel_type", "no_kernel_version", "attribute_unsupported", "dynamic_shape"})
"""What a missing kernel, or a failure over a node, turns out to be when something about the node is changed."""
OWN_NAMES = {
    "MemcpyFromHost": re.compile(r"Memcpy(_token_\d+)?"),
    "MemcpyToHost": re.compile(r"Memcpy(_token_\d+)?"),
    "Transpose": re.compile(r"Transpose(_token_\d+)?"),
    "Cast": re.compile(r"InsertedPrecisionFreeCast_.+"),
    "QuantizeLinear": re.compile(r"QuantizeLinear(_token_\d+)?|.+_q(_token_\d+)?"),
    "DequantizeLinear": re.compile(r"DequantizeLinear(_token_\d+)?|.+(_dq|/duplicated)(_token_\d+)?"),
}
"""Names that ONNX Runtime gives to nodes it inserts, by operator."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a reason may look at: one node that is not on the wanted provider."""

    node: str
    op_type: str | None
    provider: str
    """ONNX Runtime's name of the provider the node is on."""
    wanted: ChainEntry
    """First entry of the chain."""
    exported: bool
    """The ONNX file has a node of this name."""
    replaces: tuple[str, ...]
    """Exported nodes this one took the place of, where its name tells."""
    log: tuple[str, ...]
    """Native log lines that mention the node or one that it replaces."""
    patterns: tuple[LogPattern, ...] = ()
    """How such lines, and those of `session_log`, give a reason away: the wanted provider's patterns."""
    session_log: tuple[str, ...] = ()
    """Native log lines that a pattern without a node's name fits: they are about a whole graph."""
    pin: str | None = None
    """The user's pin that covers the node, as it was written, e.g. cpu:lm_head."""
    probe: NodeProbe | None = None
    """Experiments on the node, or on one that it replaces."""
    rejected: RejectedPart | None = None
    """The smallest part of the graph that the wanted provider does not open."""
    budget: str = ""
    """The memory budget that the user gave the wanted provider, e.g. cuda.memory_budget_kb=1000."""
    nameless: bool = False
    """ONNX Runtime gave it no name, so that lines of `log` may have a blank in its place."""
    beside: tuple[str, ...] = ()
    """Exported nodes that ONNX Runtime rewrote together, and added this node while it did."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason that applies, and what shows it."""

    kind: EvidenceKind
    evidence: str
    remedy: str | None = None
    """Only when this case needs another remedy than the reason's own."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do about a reason, as a command line of Partita."""

    title: str
    """In three words."""
    remedy: Remedy
    """The command, and what comes of it. In braces what a report fills in: `checkpoint`, `out` (a new package), `path`
    (what was run), `provider` (the one that was wanted), `chain`."""
    exports: bool = False
    """It makes the package anew, so there has to be one."""
    chooses_lowering: bool = False
    """It asks the provider which lowering it takes: nothing new for a package that was made so."""
    unless: tuple[tuple[str, str], ...] = ()
    """Fields of the package, and values with which the command changes nothing."""
    probes: bool = False
    """It makes the experiments that are missing; without any missing it tells nothing new."""


EXPORT = ("partita", "export", "{checkpoint}", "{out}")
PLACE = ("partita", "place", "{path}", "--provider", "{chain}")
RETARGET = Step(
    "Export it for {provider}",
    Remedy(
        "asks {provider}, where it is installed, which attention lowering it takes most of, and writes that one",
        (*EXPORT, "--target", "{provider}"),
    ),
    exports=True,
    chooses_lowering=True,
)
STATIC = Step(
    "Fix all sizes",
    Remedy(
        "fixes every size, so that shapes need not be computed", (*EXPORT, "--target", "{provider}", "--static-shapes")
    ),
    exports=True,
)
HALF = Step(
    "Export in float16",
    Remedy("writes the package in float16", (*EXPORT, "--target", "{provider}", "--precision", "fp16")),
    exports=True,
    unless=(("precision", "fp16"), ("precision", "bf16")),
)
SINGLE = Step(
    "Export in float32",
    Remedy("writes the package in float32", (*EXPORT, "--target", "{provider}", "--precision", "fp32")),
    exports=True,
    unless=(("precision", "fp32"),),
)
STANDARD = Step(
    "Use standard operators",
    Remedy(
        "writes attention and cache in operators of opset 17, without asking a provider",
        (*EXPORT, "--attention", "primitives"),
    ),
    exports=True,
    unless=(("attention", "primitives"),),
)
PROBE = Step(
    "Find out why",
    Remedy("makes the experiments that are missing", (*PLACE, "--probe-seconds", "600", "--report", "again.json")),
    probes=True,
)
WITHOUT_OPTIONS = Step("Place it freely", Remedy("places it without pins and without a memory budget", PLACE))
ASK_PROVIDER = Step(
    "Ask the provider",
    Remedy("tries {provider} in a process of its own and says what keeps it from running", ("partita", "providers")),
)
ASK_OPTIONS = Step(
    "Look up its options", Remedy("lists the options of every provider", ("partita", "providers", "--json"))
)


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason code."""

    code: str
    level: Literal["provider", "node"]
    title: str
    condition: str
    """When the reason applies, in words."""
    needs: str
    """The evidence without which it is not given."""
    remedy: str
    example: Context
    """A node that this reason applies to; documentation and test in one."""
    decide: Callable[[Context], Finding | None]
    steps: tuple[Step, ...] = ()
    """Commands that go with the remedy, the one to try first before the others."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z_]*", self.code):
            raise ValueError(f"{self.code!r} is not a reason code: lower-case letters and underscores only")


@cache
def load_reasons() -> tuple[Reason, ...]:
    """Every reason of this folder, by code. Raises ValueError when a file and its code have different names."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    names = sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.name != "base")
    reasons = []
    for name in names:
        reason = importlib.import_module(f"{package.__name__}.{name}").REASON
        if not isinstance(reason, Reason) or reason.code != name:
            raise ValueError(f"{package.__name__}.{name}: REASON must be a Reason whose code is {name!r}")
        reasons.append(reason)
    return tuple(reasons)


def explain(context: Context) -> tuple[Reason, Finding]:
    """The reason with the strongest evidence for this node; equal evidence goes by code.

    Raises LookupError when no reason answers, which the `unexplained` reason rules out.
    """
    answers = [(reason, finding) for reason in load_reasons() if (finding := reason.decide(context)) is not None]
    if not answers:
        raise LookupError(f"{context.node}: no reason applies")
    return min(answers, key=lambda answer: (STRENGTH.index(answer[1].kind), answer[0].code))


def logged(context: Context, code: str) -> Finding | None:
    """A finding when a line about the node fits a pattern that gives `code`.

    The pattern's group `node` must be one of the node's names as a whole, not the beginning of a longer one. A provider
    that did not start has looked at no node.
    """
    if context.wanted.status != "active":
        return None
    for pattern in context.patterns:
        if pattern.reason != code or not names_a_node(pattern):
            continue
        blank = with_blank(pattern) if context.nameless else None
        if blank is not None and (found := next((line for line in context.log if blank.search(line)), None)):
            return Finding("logged", found.strip())
        for name in (context.node, *context.replaces):
            line = next((line for line in context.log if name_in(line, pattern, name)), None)
            if line is not None:
                return Finding("logged", line.strip())
    return None


def probed(context: Context, code: str) -> Finding | None:
    """A finding when experiments on the node show this very reason.

    They count for a provider that failed over the graph, too, when this node is what it failed over.
    """
    culprit = is_culprit(context)
    if context.wanted.status != "active" and not culprit:
        return None
    shown = conclude(context.probe)
    if shown is None or shown.code != code:
        return None
    whole = "the provider fails over the whole graph because of this node: " if culprit else ""
    return Finding("probed", f"{whole}{shown.evidence}")


def is_culprit(context: Context) -> bool:
    """Whether the provider fails over the graph, and over this very node of it when it is tried by itself."""
    part, probe = context.rejected, context.probe
    inside = part is not None and context.node in part.nodes
    return inside and probe is not None and bool(probe.trials) and probe.trials[0].outcome in FAILED


def inserted(context: Context) -> bool:
    """Whether the file has no such node, and that ONNX Runtime added it is clear by its neighbours or its name."""
    name = OWN_NAMES.get(context.op_type or "")
    own = name is not None and name.fullmatch(context.node) is not None
    return not context.exported and (own or bool(context.beside))


def said_of_operator(context: Context) -> str:
    """What the provider said of the node alone when it failed, and named the operator as one that it does not have."""
    probe = context.probe
    if probe is None or not probe.trials or probe.unprobed or context.op_type is None:
        return ""
    first = probe.trials[0]
    if first.outcome not in FAILED and context.rejected is None:
        return ""
    patterns = [pattern.pattern for pattern in context.patterns if pattern.reason == "no_kernel_op"]
    named = re.search(rf"\b{re.escape(context.op_type)}\b", first.said)
    return first.said if named and any(re.search(pattern, first.said) for pattern in patterns) else ""


def names_a_node(pattern: LogPattern) -> bool:
    """True when the lines that it fits are about one node."""
    return "(?P<node>" in pattern.pattern


def name_in(line: str, pattern: LogPattern, name: str) -> bool:
    """True when `pattern` finds this very name in `line`."""
    if NODE_GROUP in pattern.pattern:
        # What follows the name ends it: the end of the line where the pattern ends too, else a blank or a bracket.
        end = r"\s*$" if pattern.pattern.endswith(NODE_GROUP) else r"(?![^\s,;)}])"
        exact = pattern.pattern.replace(NODE_GROUP, f"(?P<node>{re.escape(name)}){end}")
        return bool(name) and re.search(exact, line) is not None
    return any(match["node"] == name for match in re.finditer(pattern.pattern, line))


def about_the_graph(context: Context, code: str) -> Finding | None:
    """A finding when a line about the whole graph fits a pattern that gives `code`."""
    for pattern in context.patterns if context.wanted.status == "active" else ():
        if pattern.reason == code and not names_a_node(pattern):
            line = next((line for line in context.session_log if re.search(pattern.pattern, line)), None)
            if line is not None:
                return Finding("logged", line.strip())
    return None


def unavailable(context: Context, code: str, *, kind: EvidenceKind = "logged", otherwise: str = "") -> Finding | None:
    """A finding when the wanted provider is not there for this very reason; `otherwise`: evidence where none is told.

    Without evidence there is no finding.
    """
    entry = context.wanted
    if entry.status != "unavailable" or entry.reason != code or not (entry.evidence or otherwise):
        return None
    return Finding(kind, entry.evidence or otherwise, entry.remedy)
