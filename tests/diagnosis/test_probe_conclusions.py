"""Conclusions from probes: which nodes are probed, and the resulting reasons in the report."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from partita.diagnosis.explanation import nodes_to_probe
from partita.diagnosis.probe_conclusions import CAUSES, Finding, conclusions, fullest
from partita.diagnosis.reasons import REASONS, remedy_of
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import Factor, NodeProbe, Outcome, ProbeRun, RejectedPart, Substitution
from partita.observations.records import ChainEntry, Probing
from tests.diagnosis.reason_examples import LEFT
from tests.diagnosis.test_reasons import GATHER, context, decide, probe
from tests.partition_reports.samples import (
    GPU,
    GPU_CHAIN,
    mixed_facts,
    mixed_session,
    report_of,
    run_facts,
    with_session,
)

FACTORS = tuple(CAUSES)
DET, CONCAT = "model.layers.0.self_attn/Det", "model.rotary_emb/Concat"


def changed(factor: Factor, outcome: Outcome, change: str = "something else", *parts: Factor) -> ProbeRun:
    now, _, before = change.partition(" in place of ")
    before, place, where = before.partition(" in ")
    substitution = Substitution(now, before, f"in {where}" if place else "") if before else None
    removes = change.startswith("without ")
    return ProbeRun(factor, change, outcome, "", factors=parts, substitution=substitution, removes=removes)


def conclude(made: NodeProbe | None) -> Finding | None:
    """The finding for a node with which only experiments were made."""
    found = decide(context(probe=made))
    return None if found.code == "unexplained" else found


NOT_TYPE = changed("type", "rejected")
BOTH = changed("combined", "supported", "float16 in place of float32 and all sizes fixed", "static_shape", "type")
LATE = changed("opset", "timed_out", "an older one")
FAILURES: tuple[tuple[Outcome, str], ...] = (("failed", "fails"), ("crashed", "crashes"))
DECLARED = changed("output_shape", "supported", "the declared output sizes [2,9]")
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
    **{
        f"{outcome}, {missing or 'complete'}": (
            probe(ProbeRun("as_is", "", outcome, "SIGSEGV"), NOT_TYPE, missing=missing),
            "subgraph_rejected",
            (f"the provider {says} on it (SIGSEGV)",),
        )
        for outcome, says in FAILURES
        for missing in ("", TIME)
    },
    # Changes that help.
    "a change that removes something": (
        probe(LEFT, changed("attribute", "supported", "without alpha=2")),
        "attribute_unsupported",
        ("^without alpha=2 the provider supports this node",),
    ),
    "a declaration": (probe(LEFT, DECLARED), "dynamic_shape", ()),
    "a declaration and another change": (
        probe(LEFT, DECLARED, changed("input", "supported", "input shape as a constant")),
        "attribute_unsupported",
        (),
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
    "incomplete, and nothing helps": (probe(LEFT, NOT_TYPE, missing=TIME), None, ()),
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
}


@pytest.mark.parametrize("case", CONCLUSIONS)
def test_probe_outcomes_yield_reason_and_evidence(case):
    made, expected, texts = CONCLUSIONS[case]
    shown = conclude(made)
    assert (shown.code if shown is not None else None) == expected
    for text in texts:
        pattern = re.escape(text).replace(r"\^", "^").replace(r"\$", "$")
        assert shown is not None and re.search(pattern, shown.evidence), shown


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("as_is", ["rejected", "failed", "crashed", "timed_out"])
def test_single_helpful_change_names_the_cause(factor, as_is):
    others = [changed(other, "rejected") for other in FACTORS if other not in (factor, "output_shape")]
    shown = conclude(
        probe(changed("as_is", as_is, ""), *others, changed(factor, "supported", "float16 in place of int8"))
    )
    assert shown is not None and shown.code == CAUSES[factor]
    assert "with float16 in place of int8 the provider supports this node" in shown.evidence


def test_least_intrusive_helpful_change_is_the_cause():
    every = {factor: changed(factor, "supported") for factor in FACTORS}
    for expected in ("option_needed", "dynamic_shape", "no_kernel_type", "no_kernel_version", "attribute_unsupported"):
        shown = conclude(probe(LEFT, *reversed(every.values())))
        assert shown is not None and shown.code == expected, "the order of experiments decides nothing"
        every = {factor: trial for factor, trial in every.items() if CAUSES[factor] != expected}


def test_fullest_selects_first_probe_with_conclusion():
    probes = {
        "a": NodeProbe("a", (), "no type"),
        "b": NodeProbe("b", (LEFT, changed("type", "supported"))),
        "c": NodeProbe("c", (LEFT,)),
    }
    assert fullest(probes, ["a", "b", "c"]) is probes["b"]
    assert fullest(probes, ["a", "none"]) is probes["a"]
    assert fullest(probes, ["none"]) is None


TAKEN_AS_FLOAT = (LEFT, changed("type", "supported", "float32 in place of int64"))


@pytest.mark.parametrize(("pins", "expected"), [({}, (GATHER, DET)), ({DET: "cpu:Det"}, (GATHER,))])
def test_only_nodes_without_cause_are_probed(pins, expected):
    """The log has a line without a cause for Gather, a cause for Concat, and no line about Det."""
    found = nodes_to_probe(SessionIndex(mixed_session(pins=pins)), GPU_CHAIN, GPU_CHAIN[0])
    assert found == expected, "in execution order; nodes that ONNX Runtime inserted are not in the file"


def test_fallback_has_probe_outcomes_and_report_has_totals():
    incomplete = NodeProbe(DET, (LEFT,), "the time for experiments ran out")
    facts = with_session(mixed_facts(), probes={GATHER: probe(*TAKEN_AS_FLOAT), DET: incomplete})
    took = Probing(seconds=2.5, budget_seconds=60.0, experiments=7, cached=3, crashes=1, missing_probes=(DET,))
    report = report_of(replace(facts, probing=took), GPU_CHAIN)
    found = {entry.node: entry for entry in report.fallbacks if entry.phase == "decode"}
    assert (found[GATHER].reason, found[GATHER].evidence_kind) == ("no_kernel_type", "probed")
    tried = [(trial.factor, trial.outcome) for trial in found[GATHER].variants]
    assert tried == [("as_is", "rejected"), ("type", "supported")]
    assert (found[DET].reason, found[DET].missing_probes) == ("unexplained", incomplete.missing_probes)
    assert found[CONCAT].variants == () and found[CONCAT].missing_probes == ""
    assert report.probing == took


GONE = ChainEntry(provider=GPU, status="unavailable", reason="subgraph_rejected", evidence="it failed", remedy="-")
BROKEN = changed("as_is", "failed", "")
WRAP = changed("attribute", "supported", "without mode=wrap")
ONE, TWO = RejectedPart((GATHER,), "no device", True, 9), RejectedPart((GATHER, DET), "no device", True, 9)
# Fields of the node Gather, its experiments, and the code and text of the finding that decides.
REJECTED: dict[str, tuple[dict[str, Any], tuple[ProbeRun, ...], str, str]] = {
    "without experiments": ({"rejected_part": ONE}, (), "subgraph_rejected", "part that fails alone is .*this node is"),
    "another node": ({"rejected_part": ONE, "node": DET}, (), "subgraph_rejected", "the graph fails as a whole"),
    "fails alone": (
        {"rejected_part": ONE},
        (BROKEN, WRAP),
        "attribute_unsupported",
        "the whole graph because of this node: without mode=wrap the provider supports",
    ),
    "of two, fails alone": ({"rejected_part": TWO, "fails_alone": True}, (BROKEN, WRAP), "attribute_unsupported", ""),
    "of two, the other fails alone": (
        {"rejected_part": TWO, "fails_alone": True},
        (LEFT, WRAP),
        "subgraph_rejected",
        "",
    ),
    "of two, neither fails alone": ({"rejected_part": TWO}, (LEFT, WRAP), "attribute_unsupported", ""),
    "whole graph": (
        {"rejected_part": replace(TWO, is_whole_graph=True)},
        (),
        "subgraph_rejected",
        "on no part extracted from it: no device",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_node_of_a_rejected_graph_has_its_cause(case: str):
    fields, trials, code, text = REJECTED[case]
    found = decide(context(skipped=GONE, probe=probe(*trials) if trials else None, **fields))
    assert found.code == code and found.kind == "probed" and re.search(text, found.evidence), found


def test_rejected_part_is_reported():
    (record,) = report_of(run_facts(mixed_session(rejected=ONE), mixed_session()), GPU_CHAIN).rejected_parts
    assert (record.nodes, record.provider, record.evidence, record.attempts) == ((GATHER,), GPU, "no device", 9)


def test_probe_evidence_states_isolation_or_added_neg():
    for outcome in ("rejected", "failed", "crashed", "supported"):
        for company, said in ((True, "tested with only an added Neg"), (False, "tested in isolation")):
            shown = conclude(probe(replace(changed("as_is", outcome, ""), neg_added=company)))
            assert shown is not None and shown.evidence.startswith(said)


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ("QNN_COMMON_ERROR_MEM_ALLOC", []),
        ("Failed to allocate memory for requested buffer", []),
        ("VK_ERROR_OUT_OF_DEVICE_MEMORY", []),
        ("no such mode", ["attribute_unsupported"]),
    ],
)
def test_out_of_memory_node_is_not_explained_by_other_nodes(said: str, more: list[str]):
    found = conclusions(probe(ProbeRun("as_is", "", "failed", said), other("supported")))
    assert [each.code for each in found] == ["subgraph_rejected", *more]


@pytest.mark.parametrize(
    ("trial", "texts"),
    [
        (DECLARED, ("declare them in the file",)),
        (changed("static_shape", "supported"), (REASONS["dynamic_shape"].remedy,)),
        (BOTH, ("all of these are needed: (1) use an element type", f"; (2) {REASONS['dynamic_shape'].remedy}")),
        (changed("combined", "supported", "a and b", "attribute", "input"), (REASONS["attribute_unsupported"].remedy,)),
    ],
)
def test_every_change_has_its_remedy(trial: ProbeRun, texts: tuple[str, ...]):
    remedy = remedy_of(decide(context(probe=probe(LEFT, trial))))
    assert all(text in remedy for text in texts) and ("(1)" in remedy) == (len(texts) > 1)


def test_change_placed_without_run_is_marked_not_run() -> None:
    placed = ProbeRun("opset", "Relu of opset 13 in place of 14", "placed", "")
    run = replace(placed, change="Relu of opset 6 in place of 14", outcome="supported")
    for trials, text in (((placed,), r"opset 13 .*\(placed, not run\)"), ((placed, run), "opset 6 ")):
        found = decide(context(probe=probe(LEFT, *trials)))
        assert (found.code, found.not_run) == ("no_kernel_version", trials == (placed,))
        assert re.search(text, found.evidence)
