"""The reasons: a row for each code, in the order of `observations.codes`, and the precedence of their findings.

Within a rank of `PRECEDENCE`, the first row of `ROWS` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partita.diagnosis.evidence import Context, all_findings
from partita.diagnosis.probe_conclusions import CAUSES, OTHER_OPERATOR, REMEDIES, Finding
from partita.diagnosis.steps import (
    ASK_OPTIONS,
    ASK_PROVIDER,
    HALF,
    PROBE,
    RETARGET,
    SET_OPTION,
    SINGLE,
    STANDARD,
    STATIC,
    WITHOUT_OPTIONS,
    Step,
)
from partita.observations.codes import ReasonCode
from partita.observations.facts import NodeProbe
from partita.observations.records import ChainEntry


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
    needs_probes: bool = False
    """Its evidence does not show the cause, so probes run, and their finding replaces it."""


ROWS = (
    Reason(
        code="not_in_build",
        title="Provider not in this build of ONNX Runtime",
        condition="the installed ONNX Runtime was built without the provider",
        needs="the list of providers of the installed ONNX Runtime",
        remedy="install the ONNX Runtime wheel that contains the provider",
        steps=(ASK_PROVIDER,),
    ),
    Reason(
        code="library_missing",
        title="Library missing",
        condition="the provider is in the build, but the loader does not find a shared library that it needs",
        needs="the loader's message",
        remedy="install the library that the evidence names, in a folder that the loader searches",
        steps=(ASK_PROVIDER,),
    ),
    Reason(
        code="device_missing",
        title="No device found",
        condition="the provider's libraries load, but the machine has no device for it, or the driver reports none",
        needs="the provider's status and error message",
        remedy="use a machine with a device for this provider, or install the driver of the device",
        steps=(ASK_PROVIDER,),
    ),
    Reason(
        code="version_mismatch",
        title="Incompatible versions",
        condition="a library, plugin or driver is installed in a version that is incompatible with the others",
        needs="the error message",
        remedy="install compatible versions; the evidence names the incompatible component",
        steps=(ASK_PROVIDER,),
    ),
    Reason(
        code="duplicate_runtime",
        title="Several ONNX Runtimes in one environment",
        condition="more than one ONNX Runtime wheel is installed; they share one folder and overwrite each "
        "other's files",
        needs="the list of installed wheels",
        remedy="uninstall every ONNX Runtime wheel, then install one of them again",
        steps=(ASK_PROVIDER,),
    ),
    Reason(
        code="option_rejected",
        title="Option rejected",
        condition="the provider rejects the value of one of its options on this machine",
        needs="the provider's error message",
        remedy="change or remove the option that the evidence names",
        steps=(ASK_OPTIONS,),
    ),
    Reason(
        code="initialisation_failed",
        title="Initialisation failed",
        condition="the provider failed, crashed or hung at its start, and its message matches no other reason",
        needs="the signal, or the first line of the error",
        remedy="read the evidence; `partita providers` tests the provider in a separate process",
        steps=(ASK_PROVIDER,),
    ),
    Reason(
        code="pinned_by_user",
        title="Pinned by the user",
        condition="a pin assigns the node to another provider, or an option of the preferred provider assigns it "
        "to the CPU",
        needs="the pin in the request; or a log line such as `Force CPU execution for node: <node>`",
        remedy="remove the node from the pin or from the option",
        steps=(WITHOUT_OPTIONS,),
    ),
    Reason(
        code="runtime_inserted",
        title="Inserted by ONNX Runtime",
        sentence="ONNX Runtime inserted {op}",
        condition="the node is not in the ONNX file: ONNX Runtime inserted a copy, a change of layout (Transpose, "
        "ReorderInput, ReorderOutput), a Cast, or a QuantizeLinear or DequantizeLinear",
        needs="the graph of the file, and the operator or the neighbours of the node",
        remedy="place its neighbours on one provider, in one layout and type; the node then disappears",
    ),
    Reason(
        code="over_budget",
        title="Over the memory budget",
        sentence="the memory budget of {provider} was used up before {op}",
        condition="the provider's device memory budget was used up before this node",
        needs="the budget in the request and an experiment without it; or a log line with the node at which the budget "
        "ended",
        remedy="raise or remove the budget; the provider then uses more device memory",
        steps=(WITHOUT_OPTIONS,),
    ),
    Reason(
        code="option_needed",
        title="Provider option needed",
        sentence="{provider} does not support {op} with {before}",
        condition="the provider supports the node only with another value of one of its options",
        needs="an experiment: the provider supports the unchanged node with another value of the option",
        remedy="set the provider option that the evidence names; it applies to all nodes",
        steps=(SET_OPTION,),
    ),
    Reason(
        code="dynamic_shape",
        title="Dynamic shapes not supported",
        sentence="{provider} does not support {op} with dynamic sizes",
        condition="the provider supports the node only with static shapes, or with known ranks",
        needs="experiments: the provider supports the node with the sizes or ranks of the run and no other change",
        remedy="make the shapes of the model's inputs static; for a package: export --static-shapes",
        steps=(STATIC,),
    ),
    Reason(
        code="no_kernel_type",
        title="No kernel for the type",
        sentence="{provider} has no {before} kernel for {op}",
        condition="the provider supports the operator, but not with the node's element types",
        needs="experiments: the provider supports the node with another element type, or supports other nodes "
        "of the operator only in other types",
        remedy="use an element type that the provider supports (for a package: export it with another --precision "
        "or --attention); the evidence names types that work",
        steps=(RETARGET, HALF, SINGLE),
    ),
    Reason(
        code="no_kernel_version",
        title="No kernel for the opset version",
        sentence="{provider} has no kernel for {op} of opset {before}",
        condition="the provider supports the operator in another opset version, but not in the model's",
        needs="experiments: the provider supports the node with another version of its operator and no other change",
        remedy="export with the opset that the evidence names (for a package: export --opset), or use an ONNX Runtime "
        "whose provider supports the newer version",
        steps=(RETARGET, STANDARD),
    ),
    Reason(
        code="attribute_unsupported",
        title="Attributes or inputs not supported",
        sentence="{provider} does not support {op} with {before}",
        condition="the provider has a kernel for the operator, but does not support this node's attributes, "
        "optional inputs or shapes",
        needs="a log line with the node and the cause; or experiments: the provider supports the node with another "
        "attribute, input or rank, or supports other nodes of the operator with the same version and types, or its "
        "message names another cause than the operator",
        remedy="export the model with the change that the evidence names: another attribute, one input less or more, a "
        "constant input, or another rank; compare the outputs, which the change may alter",
        steps=(RETARGET,),
    ),
    Reason(
        code="no_kernel_op",
        title="No kernel found",
        sentence="{provider} has no kernel for {op}",
        condition="the provider has no kernel for the operator; if a log line is the only evidence, it may lack only "
        "this version or type",
        needs="experiments: the provider supports no variation of the node and no other node of the operator; "
        "or a log line such as `… kernel not found in registries for Op type: <op> node name: <node>`",
        remedy=f"{OTHER_OPERATOR}; if a log line is the only evidence, raise --probe-seconds to test other opsets "
        "and types",
        steps=(RETARGET, STANDARD, PROBE),
        needs_probes=True,
    ),
    Reason(
        code="subgraph_rejected",
        title="Subgraph rejected",
        sentence="{provider} fails on {op} or on the part of the graph that contains it",
        condition="the provider fails on the graph or on the node, or it compiles subgraphs and rejects all or part of "
        "the graph",
        needs="bisection to the smallest part of the graph that fails; an experiment in which the provider fails or "
        "crashes on the node; or a log line about the subgraphs that the provider compiles",
        remedy="change the nodes that the evidence names, or run them on another provider, which adds copies; "
        "if it names none, check the nodes at the boundaries of the provider's partitions for unsupported "
        "operators and types",
        steps=(RETARGET, STANDARD),
        needs_probes=True,
    ),
    Reason(
        code="cpu_preferred",
        title="CPU preferred by ONNX Runtime",
        sentence="ONNX Runtime places {op} on the CPU, because the inputs are small values in CPU memory",
        condition="the inputs are small values in CPU memory, so ONNX Runtime expects the copies to cost more than the "
        "provider saves",
        needs="the log line `ORT optimization- Force fallback to CPU execution for node: <node>`",
        remedy="usually harmless; static shapes remove most shape computations (for a package: export --static-shapes)",
        steps=(STATIC,),
    ),
    Reason(
        code="not_claimed",
        title="Not supported in this graph",
        sentence="{provider} supports {op}, but not in this graph",
        condition="the provider supports the node in isolation, or with other types of its neighbours, but is not "
        "assigned the node in this graph, and the log names no cause",
        needs="an experiment: the provider supports the node in isolation, or in its quantised group with another "
        "type; or it supports a changed node in the main graph, but not in a control-flow subgraph",
        remedy="check its neighbours: a provider may skip a node whose neighbours it does not support, or a partition "
        "that is too small",
        steps=(RETARGET,),
        needs_probes=True,
    ),
    Reason(
        code="unexplained",
        title="Unexplained",
        sentence="no source shows why {provider} does not run {op}",
        condition="no other reason applies",
        needs="nothing",
        remedy="report the node with its operator, types and ONNX Runtime version, and a native log at INFO",
        steps=(PROBE,),
        needs_probes=True,
    ),
)
REASONS: Mapping[str, Reason] = {reason.code: reason for reason in ROWS}
"""Every reason by its code."""


def steps_of(code: str | None) -> tuple[Step, ...]:
    """The steps of a reason; none for an unknown code."""
    reason = REASONS.get(code or "")
    return reason.steps if reason is not None else ()


@dataclass(frozen=True, slots=True)
class Rank:
    """Findings of these codes on this basis; they precede all later rows."""

    basis: str
    """Source of a finding."""
    ground: str = ""
    """The basis as text, in the row for all other codes."""
    codes: tuple[ReasonCode, ...] = ()
    """Empty: every code that no other row of this basis lists."""


PRECEDENCE: tuple[Rank, ...] = (
    Rank("pin", "a pin covers the node"),
    # The node may be on the preferred provider.
    Rank("nowhere", "no source shows the node's provider"),
    # The provider itself names node and cause.
    Rank("line", "a log line names the node"),
    Rank("blank_line", "a log line without the node's name"),
    # One change isolates the cause; a log line `no kernel` does not distinguish operator, version and type.
    Rank("alone", "an experiment on the node in isolation"),
    Rank("together", "an experiment with several changes of the node"),
    # Fixed sizes or an option may accompany every other change.
    Rank("together", codes=("option_needed", "dynamic_shape")),
    Rank("vague_line", "a log line names the node, but not the cause"),
    Rank("forms", "experiments with other nodes of the operator"),
    Rank("alone_said", "the provider's message about the node in isolation"),
    Rank("alone_left", "the provider fails on the graph and does not support the node in isolation"),
    # A provider that fails on the graph has placed no node.
    Rank("part", "bisection of the graph"),
    # A provider that did not start has placed no node.
    Rank("entry", "the provider did not start"),
    # A node that ONNX Runtime added is not in the model.
    Rank("origin", "the ONNX file has no such node"),
    Rank("alone", codes=("no_kernel_op",)),
    Rank("line", codes=("no_kernel_op",)),
    Rank("alone", codes=("subgraph_rejected",)),
    Rank("line", codes=("subgraph_rejected",)),
    Rank("budget", "a memory budget, without another cause"),
    Rank("alone", codes=("not_claimed",)),
    Rank("line", codes=("not_claimed",)),
    # A log line without a node name may be about another node of the operator.
    Rank("blank_line", codes=("no_kernel_op", "subgraph_rejected", "not_claimed")),
    Rank("graph_line", "a log line about the graph"),
    Rank("nothing", "no evidence"),
)

GROUNDS: Mapping[str, str] = {rank.basis: rank.ground for rank in PRECEDENCE if rank.ground}
RANKS: Mapping[tuple[str, str], int] = {
    (rank.basis, code): number for number, rank in enumerate(PRECEDENCE) for code in rank.codes or ("",)
}
"""Basis and code, or an empty code for all others -> row of `PRECEDENCE`."""


def rank_of(code: str, basis: str) -> int:
    """The row of a finding: the row of the basis that lists the code, else the basis's row without codes."""
    return RANKS.get((basis, code), RANKS[basis, ""])


def findings(context: Context) -> list[Finding]:
    """Every reason that applies, with its evidence, in the order of the table; the first decides.

    `unexplained` always applies.
    """
    order = list(REASONS)
    return sorted(all_findings(context), key=lambda found: (rank_of(found.code, found.basis), order.index(found.code)))


def remedy_of(found: Finding) -> str:
    """The remedy of a finding; for several changes, the remedy of each, that of the finding's reason first."""
    changes = sorted(found.changes, key=lambda factor: CAUSES[factor] != found.code)
    texts = [*dict.fromkeys(REMEDIES.get(factor) or REASONS[CAUSES[factor]].remedy for factor in changes)]
    texts = texts or [found.remedy or REASONS[found.code].remedy]
    numbered = "; ".join(f"({number}) {text}" for number, text in enumerate(texts, 1))
    return f"all of these are needed: {numbered}" if len(texts) > 1 else texts[0]


def describe_rank(code: str, basis: str) -> str:
    """A finding's rank and basis as text, e.g. `rank 5: an experiment on the node in isolation`."""
    if basis not in GROUNDS:  # in a report of another version
        return "unknown rank"
    return f"rank {rank_of(code, basis) + 1}: {GROUNDS[basis]}"


def reason_from_probes(probe: NodeProbe, provider: str) -> tuple[ReasonCode, str] | None:
    """The reason and evidence from experiments on a node with `provider` alone; None if they show no reason."""
    skipped = ChainEntry(provider=provider, status="active")
    found = findings(Context(probe.node, None, skipped, probe=probe))[0]
    return None if found.basis == "nothing" else (found.code, found.evidence)
