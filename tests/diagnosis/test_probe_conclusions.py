"""Conclusions from probes: which nodes are probed, and the resulting reasons in the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from partita.diagnosis.explanation import find_fallbacks, nodes_to_probe
from partita.diagnosis.probe_conclusions import conclusions, fullest, unprobed_nodes
from partita.diagnosis.reasons import REASONS, explain
from partita.diagnosis.session_index import index_session
from partita.observations.facts import Factor, NodeProbe, Outcome, ProbeRun, RejectedPart, Substitution
from partita.observations.records import ChainEntry, Probing
from tests.diagnosis.test_reasons import GATHER, context
from tests.partition_reports.samples import (
    CPU_CHAIN,
    GPU,
    GPU_CHAIN,
    NO_GPU_CHAIN,
    NO_KERNEL,
    PREFERRED,
    mixed_facts,
    mixed_session,
    report_of,
    run_facts,
    with_session,
)

CODES = {factor: reason.code for reason in REASONS.values() for factor in reason.factors}
DET, CONCAT = "model.layers.0.self_attn/Det", "model.rotary_emb/Concat"
LEFT = ProbeRun("as_is", "", "rejected", "")


def probe(*trials: ProbeRun, unprobed: str = "") -> NodeProbe:
    return NodeProbe(GATHER, trials, unprobed)


def changed(factor: Factor, outcome: Outcome, change: str = "something else", *parts: Factor) -> ProbeRun:
    now, _, before = change.partition(" in place of ")
    before, place, where = before.partition(" in ")
    substitution = Substitution(now, before, f"in {where}" if place else "") if before else None
    removes = change.startswith("without ")
    return ProbeRun(factor, change, outcome, "", factors=parts, substitution=substitution, removes=removes)


class Shown(NamedTuple):
    """What a report says of a node with which only experiments were made."""

    code: str
    evidence: str


def conclude(made: NodeProbe | None) -> Shown | None:
    reason, finding = explain(context(probe=made))
    return None if reason.code == "unexplained" else Shown(reason.code, finding.evidence)


# --- conclusions ---------------------------------------------------------------------------------------------------

NOT_TYPE = changed("type", "rejected")
BOTH = changed("combined", "supported", "float16 in place of float32 and all sizes fixed", "static_shape", "type")
LATE = changed("opset", "timed_out", "an older one")
TIME = "the time was up"


def other(outcome: Outcome, *parts: Factor, words: str = "T float32", unfolded: bool = False) -> ProbeRun:
    return ProbeRun("other_form", words, outcome, "", factors=parts, function_inlined=unfolded)


def types(*changes: str) -> tuple[ProbeRun, ...]:
    return (LEFT, *(changed("type", "supported", change) for change in changes))


# Experiments on a node, the reason that they show, and text of the evidence; `^` and `$` mark its start and end.
CONCLUSIONS: dict[str, tuple[NodeProbe | None, str | None, tuple[str, ...]]] = {
    "no probe": (None, None, ()),
    "supported in isolation": (probe(changed("as_is", "supported", "")), "not_claimed", ()),
    "supported as its function": (
        probe(replace(changed("as_is", "supported", ""), function_inlined=True)),
        "not_claimed",
        ("supports the nodes of its function, not the operator itself",),
    ),
    "no answer in isolation": (probe(changed("as_is", "timed_out", ""), NOT_TYPE), None, ()),
    # Changes that help.
    "a change that removes something": (
        probe(LEFT, changed("attribute", "supported", "without alpha=2")),
        "attribute_unsupported",
        ("^without alpha=2 the provider supports this node",),
    ),
    "two values that help": (
        probe(*types("int32 in place of int64", "uint8 in place of int64")),
        "no_kernel_type",
        ("^with int32 or uint8 in place of int64 the provider",),
    ),
    "more values than are named": (
        probe(*types(*(f"t{number} in place of x" for number in range(5)))),
        "no_kernel_type",
        ("^with t0, t1, t2 or 2 more in place of x the",),
    ),
    "two changes together": (
        probe(LEFT, NOT_TYPE, BOTH),
        "no_kernel_type",
        (
            "with float16 in place of float32 and all sizes fixed",
            "with one change at a time (1 tested) it does not",
        ),
    ),
    # No change helps.
    "nothing helps": (
        probe(LEFT, NOT_TYPE, changed("type", "invalid"), changed("opset", "rejected")),
        "no_kernel_op",
        ("2 variations (other types and other opsets) made no difference",),
    ),
    "no change is possible": (probe(LEFT), "no_kernel_op", ("no variation is possible",)),
    "combinations that were not tested": (
        replace(probe(LEFT, NOT_TYPE, changed("opset", "invalid")), omitted=12),
        "no_kernel_op",
        ("1 variation could not be tested", "12 more combinations of changes not tested$"),
    ),
    "incomplete, and nothing helps": (probe(LEFT, NOT_TYPE, unprobed=TIME), None, ()),
    "a late change may have helped": (probe(LEFT, NOT_TYPE, LATE), None, ()),
    # Other nodes of the operator.
    "other types only": (
        probe(LEFT, NOT_TYPE, other("rejected"), other("rejected"), other("supported", "type")),
        "no_kernel_type",
        (
            "supports other nodes of this operator (e.g. T float32), but none of 2 nodes with the types",
            "1 variation (other types) made no difference",
        ),
    ),
    "the same types": (
        probe(LEFT, changed("attribute", "rejected"), other("supported", words="T float32; mode=linear")),
        "attribute_unsupported",
        ("(e.g. T float32; mode=linear) with the types of this node", "1 variation"),
    ),
    "none of them": (
        probe(LEFT, NOT_TYPE, other("rejected"), other("rejected", "type"), other("invalid")),
        "no_kernel_op",
        ("it supports none of 2 other nodes of this operator$",),
    ),
    "none that could be tested in its types": (
        probe(LEFT, other("invalid"), other("supported", "type", words="")),
        "attribute_unsupported",
        ("supports other nodes of this operator, but none could be tested with its types",),
    ),
    "failures over them": (
        probe(LEFT, other("rejected"), other("failed"), other("timed_out")),
        "attribute_unsupported",
        ("it fails on 2 of 3 other nodes of this operator",),
    ),
    "a change of the node helps, too": (probe(LEFT, BOTH, other("supported")), "no_kernel_type", ()),
}


@pytest.mark.parametrize("case", CONCLUSIONS)
def test_probe_outcomes_yield_reason_and_evidence(case):
    made, expected, texts = CONCLUSIONS[case]
    shown = conclude(made)
    assert (shown.code if shown is not None else None) == expected
    for text in texts:
        assert shown is not None and text.strip("^$") in f"{shown.evidence}"
        assert not text.startswith("^") or shown.evidence.startswith(text[1:])
        assert not text.endswith("$") or shown.evidence.endswith(text[:-1])


@pytest.mark.parametrize(("factor", "expected"), CODES.items())
@pytest.mark.parametrize("as_is", ["rejected", "failed", "crashed", "timed_out"])
def test_single_helpful_change_names_the_cause(factor, expected, as_is):
    others = [changed(other, "rejected") for other in CODES if other not in (factor, "output_shape")]
    shown = conclude(
        probe(changed("as_is", as_is, ""), *others, changed(factor, "supported", "float16 in place of int8"))
    )
    assert shown is not None and shown.code == expected
    assert "with float16 in place of int8 the provider supports this node" in shown.evidence


def test_least_intrusive_helpful_change_is_the_cause():
    every = {factor: changed(factor, "supported") for factor in CODES}
    for expected in ("option_needed", "dynamic_shape", "no_kernel_type", "no_kernel_version", "attribute_unsupported"):
        shown = conclude(probe(LEFT, *reversed(every.values())))
        assert shown is not None and shown.code == expected, "the order of experiments decides nothing"
        every = {factor: trial for factor, trial in every.items() if CODES[factor] != expected}


@pytest.mark.parametrize(("outcome", "says"), [("failed", "the provider fails on it"), ("crashed", "crashes on it")])
def test_failing_or_crashing_node_is_rejected_with_message(outcome, says):
    first = ProbeRun("as_is", "", outcome, "its process was killed by SIGSEGV")
    for unprobed in ("", TIME):
        shown = conclude(probe(first, NOT_TYPE, unprobed=unprobed))
        assert shown is not None and shown.code == "subgraph_rejected"
        assert says in shown.evidence and "SIGSEGV" in shown.evidence


# --- a node and what it replaces -----------------------------------------------------------------------------------


def test_fullest_selects_first_probe_with_conclusion():
    probes = {
        "a": NodeProbe("a", (), "no type"),
        "b": NodeProbe("b", (LEFT, changed("type", "supported"))),
        "c": NodeProbe("c", (LEFT,)),
    }
    assert fullest(probes, ["a", "b", "c"]) is probes["b"]
    assert fullest(probes, ["a", "none"]) is probes["a"]
    assert fullest(probes, ["none"]) is None
    assert list(unprobed_nodes(probes)) == ["a"]


# --- reasons -------------------------------------------------------------------------------------------------------

TAKEN_AS_FLOAT = (LEFT, changed("type", "supported", "float32 in place of int64"))


KERNEL_LINE = "CUDA kernel not found in registries for Op type: Gather"
LEFT_BY_LINE = replace(LEFT, message=KERNEL_LINE)
TRUSTED_LINE = {"node": CONCAT, "op_type": "Concat", "log": (PREFERRED,)}
# Fields of the node besides `probe`, the experiments, and the reason with its kind of evidence that decides.
DECIDING: dict[str, tuple[dict[str, Any], NodeProbe | None, tuple[str, str]]] = {
    "a line gives way to the cause": ({}, probe(*TAKEN_AS_FLOAT), ("no_kernel_type", "probed")),
    **{
        f"a line gives way to {factor}": ({}, probe(LEFT, changed(factor, "supported")), (code, "probed"))
        for factor, code in CODES.items()
    },
    "no experiments": ({}, None, ("no_kernel_op", "logged")),
    "no experiment was made": ({}, probe(), ("no_kernel_op", "logged")),
    "incomplete experiments": ({}, probe(LEFT, unprobed=TIME), ("no_kernel_op", "logged")),
    "incomplete, with the provider's line": ({}, probe(LEFT_BY_LINE, unprobed=TIME), ("no_kernel_op", "logged")),
    "nothing helps": ({}, probe(LEFT, NOT_TYPE), ("no_kernel_op", "probed")),
    "a node that is left makes nothing fail": ({"log": ()}, probe(LEFT_BY_LINE, NOT_TYPE), ("no_kernel_op", "probed")),
    "a line that names the cause, a type helps": (TRUSTED_LINE, probe(*TAKEN_AS_FLOAT), ("cpu_preferred", "logged")),
    "a line that names the cause, nothing helps": (TRUSTED_LINE, probe(LEFT, NOT_TYPE), ("cpu_preferred", "logged")),
    "a line that names the cause, supported alone": (
        TRUSTED_LINE,
        probe(changed("as_is", "supported", "")),
        ("cpu_preferred", "logged"),
    ),
}


@pytest.mark.parametrize("case", DECIDING)
def test_log_line_or_probe_decides(case):
    fields, made, expected = DECIDING[case]
    reason, finding = explain(context(**{"log": (NO_KERNEL,), **fields}, probe=made))
    assert (reason.code, finding.kind) == expected
    assert "fail" not in finding.evidence
    if expected[1] == "probed":
        assert "--probe-seconds" not in (finding.remedy or reason.remedy), "they were made"


# --- which nodes call for experiments ------------------------------------------------------------------------------


def test_only_nodes_without_cause_are_probed():
    """The log has a line without a cause for Gather, a cause for Concat, and no line about Det."""
    found = nodes_to_probe(index_session(mixed_session()), GPU_CHAIN, GPU_CHAIN[0])
    assert found == (GATHER, DET), "in execution order; nodes that ONNX Runtime inserted are not in the file"


def test_pinned_node_is_not_probed():
    pinned = mixed_session(pins={DET: "cpu:Det"})
    assert nodes_to_probe(index_session(pinned), GPU_CHAIN, GPU_CHAIN[0]) == (GATHER,)


# --- the report ----------------------------------------------------------------------------------------------------


def probed_facts(**probes: NodeProbe):
    named = {GATHER: probes.get("gather"), DET: probes.get("det")}
    facts = with_session(mixed_facts(), probes={name: entry for name, entry in named.items() if entry is not None})
    took = Probing(seconds=2.5, budget_seconds=60.0, experiments=7, cached=3, crashes=1, missing_probes=(DET,))
    return replace(facts, probing=took)


def test_fallback_has_probe_outcomes_and_report_has_totals():
    facts = probed_facts(
        gather=NodeProbe(GATHER, TAKEN_AS_FLOAT), det=NodeProbe(DET, (LEFT,), "the time for experiments ran out")
    )
    report = report_of(facts, GPU_CHAIN)
    found = {entry.node: entry for entry in report.fallbacks if entry.phase == "decode"}
    assert (found[GATHER].reason, found[GATHER].evidence_kind) == ("no_kernel_type", "probed")
    assert [(trial.factor, trial.outcome) for trial in found[GATHER].variants] == [
        ("as_is", "rejected"),
        ("type", "supported"),
    ]
    assert found[DET].reason == "unexplained" and found[DET].missing_probes == "the time for experiments ran out"
    assert found[CONCAT].variants == () and found[CONCAT].missing_probes == ""
    assert report.probing is not None
    assert (report.probing.experiments, report.probing.cached, report.probing.crashes) == (7, 3, 1)
    assert report.probing.missing_probes == (DET,)


def test_rejected_part_is_reported_and_explains_every_node():
    part = RejectedPart((DET,), "vkCreateDevice failed", True, 9)
    session = mixed_session(rejected=part)
    (record,) = report_of(run_facts(session, mixed_session()), GPU_CHAIN).rejected_parts
    assert (record.nodes, record.provider, record.evidence, record.minimal, record.attempts) == (
        (DET,),
        GPU,
        "vkCreateDevice failed",
        True,
        9,
    )
    entry = NO_GPU_CHAIN[0].model_copy(update={"reason": "subgraph_rejected", "evidence": "vkCreateDevice failed"})
    found = {entry.node: entry for entry in find_fallbacks(index_session(session), "decode", (entry, *CPU_CHAIN))}
    assert {entry.reason for entry in found.values() if entry.node in (DET, GATHER)} == {"subgraph_rejected"}
    assert "this node is in it" in found[DET].evidence
    assert "the graph fails as a whole" in found[GATHER].evidence
    assert "the smallest part that fails alone" in found[DET].evidence


def test_node_failing_the_whole_graph_has_cause_from_probes():
    """For other nodes, only the failure of the whole graph is known."""
    gone = ChainEntry(provider=GPU, status="unavailable", reason="subgraph_rejected", evidence="failed", remedy="?")
    part = RejectedPart((GATHER,), "finalising failed", True, 4)
    failing = probe(changed("as_is", "failed", ""), changed("attribute", "supported", "without mode=wrap"))
    reason, finding = explain(context(skipped=gone, rejected_part=part, probe=failing))
    assert (reason.code, finding.kind) == ("attribute_unsupported", "probed")
    assert "the whole graph because of this node: without mode=wrap the provider supports" in finding.evidence
    assert explain(context(node=DET, skipped=gone, rejected_part=part))[0].code == "subgraph_rejected"


def test_probe_evidence_states_isolation_or_added_neg():
    for outcome in ("rejected", "failed", "crashed", "supported"):
        for company, said in ((True, "tested with only an added Neg"), (False, "tested in isolation")):
            shown = conclude(probe(replace(changed("as_is", outcome, ""), neg_added=company)))
            assert shown is not None and shown.evidence.startswith(said)


# --- what was found in review ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    ["QNN_COMMON_ERROR_MEM_ALLOC", "Failed to allocate memory for requested buffer", "VK_ERROR_OUT_OF_DEVICE_MEMORY"],
)
def test_out_of_memory_node_is_not_explained_by_other_nodes(said):
    def shown(text: str) -> list[str | None]:
        first = ProbeRun("as_is", "", "failed", text)
        return [each.code for each in conclusions(probe(first, other("supported")))]

    assert shown(said) == ["subgraph_rejected"]
    assert shown("no such mode") == ["subgraph_rejected", None]


def test_node_failing_alone_is_the_cause_of_rejected_part():
    part = RejectedPart((DET, CONCAT), "the compiler gave up", minimal=True, attempts=9)
    fails = NodeProbe(DET, (changed("as_is", "failed", ""), changed("attribute", "supported", "without mode=wrap")))
    left = NodeProbe(CONCAT, (changed("as_is", "rejected", ""), changed("attribute", "supported", "without axis=1")))
    gone = ChainEntry(provider=GPU, status="unavailable", reason="subgraph_rejected", evidence="it failed", remedy="-")
    codes = {
        probed.node: explain(
            context(node=probed.node, skipped=gone, rejected_part=part, probe=probed, log=(), fails_alone=True)
        )[0].code
        for probed in (fails, left)
    }
    assert codes == {DET: "attribute_unsupported", CONCAT: "subgraph_rejected"}
    together = explain(context(node=CONCAT, skipped=gone, rejected_part=part, probe=left, log=()))[0].code
    assert together == "attribute_unsupported", "none of them fails by itself, so what leaves this one is the cause"


def test_graph_failing_only_as_a_whole_is_reported():
    part = RejectedPart((DET, CONCAT), "not acyclic", minimal=False, attempts=1, is_whole_graph=True)
    gone = ChainEntry(provider=GPU, status="unavailable", reason="subgraph_rejected", evidence="it failed", remedy="-")
    reason, finding = explain(context(node=DET, skipped=gone, rejected_part=part, log=()))
    assert reason.code == "subgraph_rejected" and "on no part extracted from it: not acyclic" in finding.evidence


def test_shape_declaration_is_cause_only_if_no_other_change_helps():
    declared = changed("output_shape", "supported", "the declared output sizes [2,9]")
    by_constant = changed("input", "supported", "input shape as a constant")
    (alone,) = conclusions(probe(LEFT, declared))
    assert alone.factors == ("output_shape",)
    (both,) = conclusions(probe(LEFT, declared, by_constant))
    assert both.factors == ("input",)


def test_shape_declaration_has_its_own_remedy():
    declared = changed("output_shape", "supported", "the declared output sizes [2,9]")
    fixed = changed("static_shape", "supported", "all sizes fixed")
    remedies = []
    for trial in (declared, fixed):
        reason, finding = explain(context(probe=probe(LEFT, trial)))
        assert reason.code == "dynamic_shape"
        remedies.append(finding.remedy)
    assert "declare them in the file" in (remedies[0] or "") and remedies[1] is None


def test_change_placed_without_run_is_marked_not_run() -> None:
    placed_only = ProbeRun("opset", "Relu of opset 13 in place of 14", "placed", "")
    run = replace(placed_only, change="Relu of opset 6 in place of 14", outcome="supported")
    (placed,) = conclusions(probe(LEFT, placed_only))
    assert placed.not_run and "supports this node (placed, not run)" in placed.evidence
    (shown,) = conclusions(probe(LEFT, placed_only, run))
    assert not shown.not_run and "opset 6" in shown.evidence and "opset 13" not in shown.evidence
    for trial in (placed_only, run):
        reason, finding = explain(context(probe=probe(LEFT, trial)))
        assert (reason.code, finding.not_run) == ("no_kernel_version", trial is placed_only)
