"""The row of the table of reasons, commands of its remedy, and a function for each code with evidence of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Literal

from partita.diagnosis.evidence import (
    Basis,
    Context,
    Finding,
    common_findings,
    graph_findings,
    is_culprit,
    isolation_findings,
    line_findings,
    operator_outcome,
    rejected_alone,
)
from partita.diagnosis.graphs import LAYOUT, MEMCPY_OPS
from partita.diagnosis.probe_conclusions import conclusions
from partita.observations.codes import PROVIDER_CODES, EvidenceKind, ReasonCode
from partita.observations.facts import NEIGHBOURS, OPTION, Factor, RejectedPart
from partita.observations.names import UNKNOWN
from partita.observations.text_format import name_some
from partita.remedies import Remedy


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason code with its condition, evidence and remedy."""

    code: ReasonCode
    title: str
    condition: str
    """Condition under which the reason applies, as text."""
    needs: str
    """Required evidence, as text."""
    remedy: str
    sentence: str = ""
    """The reason as a sentence with {provider}, {op} and {before}, the value that a successful change replaced. Empty:
    the title is used."""
    steps: tuple[Step, ...] = ()
    """Commands of the remedy, the best first."""
    find: Callable[[Context], Iterable[Finding]] | None = None
    """Yields its findings for a node; None: `evidence.common_findings`."""
    entry_kind: EvidenceKind = "logged"
    """Kind of the evidence when a provider is unavailable for this reason."""
    needs_probes: bool = False
    """Its evidence does not show the cause, so probes run, and their finding replaces it."""
    factors: tuple[Factor, ...] = ()
    """Factors of experiments: if the provider supports the node after a change of one, this reason applies."""
    remedies: Mapping[Factor, str] = field(default_factory=dict)
    """Remedies that replace `remedy`, by the factor that shows the reason."""

    @property
    def level(self) -> Literal["provider", "node"]:
        """Whether the provider does not start, or one node is not on it."""
        return "provider" if self.code in PROVIDER_CODES else "node"

    @property
    def names_change(self) -> bool:
        """Whether the sentence names the value that a successful experiment replaced."""
        return any(field == "before" for _, field, _, _ in Formatter().parse(self.sentence))

    def findings(self, context: Context) -> Iterator[Finding]:
        """The findings of this reason for a node, with the remedies of their factors; none when it does not apply."""
        for finding in (
            self.find(context) if self.find else common_findings(context, self.code, self.entry_kind, self.factors)
        ):
            other = next((self.remedies[factor] for factor in finding.factors if factor in self.remedies), None)
            yield finding if other is None or finding.remedy else replace(finding, remedy=other)


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a step in the terms of a probe. A probe with this change shows whether the step helps."""

    factor: Factor
    new_value: str = ""
    """The new value; empty: the value that helped in an experiment."""


@dataclass(frozen=True, slots=True)
class Step:
    """A fix for a reason, as a command line of Partita."""

    title: str
    """Title of about three words."""
    remedy: Remedy
    """The command and its effect. A report fills in: `checkpoint`, `out` (a new package), `path` (the model that ran),
    `provider` (the preferred provider), `chain`, `now` (the new value of a probe), `needed` (options that the model
    needs: dry run, plugin libraries, inputs, contract), `setting` (pins and provider options of the run), `library`
    (the plugin library of `provider`), `libraries` (plugin libraries of the chain), `same_precision` (--precision of
    the package, unless it is the default)."""
    exports: bool = False
    """It exports the package again, so it requires a package."""
    chooses_lowering: bool = False
    """It queries the provider for a lowering; without effect for a package that was exported in this way."""
    unless: tuple[tuple[str, str], ...] = ()
    """Fields of the package, and their values with which the command has no effect."""
    probes: bool = False
    """It runs the missing probes."""
    change: Change | None = None
    """The same change in a probe; None: no probe shows whether the step helps."""


EXPORT = ("partita", "export", "{checkpoint}", "{out}")
FOR_TARGET = (*EXPORT, "--target", "{provider}", "{library}")
PLACE = ("partita", "place", "{path}", "--provider", "{chain}", "{needed}")
RETARGET = Step(
    "Export it for {provider}",
    Remedy(
        "keeps the precision; queries {provider} for its best attention lowering, which may have more nodes",
        (*FOR_TARGET, "{same_precision}"),
    ),
    exports=True,
    chooses_lowering=True,
)
STATIC = Step(
    "Make all shapes static",
    Remedy(
        "makes every shape static, so that no shapes are computed at run time; batch and length are fixed",
        (*FOR_TARGET, "{same_precision}", "--static-shapes"),
    ),
    exports=True,
    change=Change("static_shape"),
)
HALF = Step(
    "Export in float16",
    Remedy("writes the package in float16 (half the size, less precise)", (*FOR_TARGET, "--precision", "fp16")),
    exports=True,
    unless=(("precision", "fp16"), ("precision", "bf16")),
    change=Change("type", "float16"),
)
SINGLE = Step(
    "Export in float32",
    Remedy("writes the package in float32 (twice the size)", (*FOR_TARGET, "--precision", "fp32")),
    exports=True,
    unless=(("precision", "fp32"),),
    change=Change("type", "float32"),
)
STANDARD = Step(
    "Use standard operators",
    Remedy(
        "writes attention and cache in operators of opset 18, which are more nodes than a fused kernel",
        (*EXPORT, "--attention", "primitives", "{same_precision}"),
    ),
    exports=True,
    unless=(("attention", "primitives"),),
)
SET_OPTION = Step(
    "Set the option",
    Remedy("sets the option of {provider} for all nodes", (*PLACE, "{setting}", "--provider-option", "{now}")),
    change=Change(OPTION),
)
PROBE = Step(
    "Run the experiments",
    Remedy(
        "runs the missing experiments (up to 10 minutes)",
        (*PLACE, "{setting}", "--probe-seconds", "600", "--report", "again.json"),
    ),
    probes=True,
)
WITHOUT_OPTIONS = Step(
    "Remove the constraints",
    Remedy("places the model without pins and without a memory budget, which may use more device memory", PLACE),
)
ASK_PROVIDER = Step(
    "Test the provider",
    Remedy(
        "tests {provider} in a separate process and reports the reason if it does not run",
        ("partita", "providers", "{libraries}"),
    ),
)
ASK_OPTIONS = Step(
    "Look up its options",
    Remedy("lists the options of every provider", ("partita", "providers", "--json")),
)


ESTIMATE = re.compile(r"Resource estimation for EP '(?P<provider>[^']+)'.*total estimated memory: (?P<bytes>\d+) bytes")
MOST_NAMED = 5
OTHER_OPERATOR = (
    "put a provider that supports the operator first in --provider, or use other operators (for a package: export it "
    "with another --attention)"
)


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
