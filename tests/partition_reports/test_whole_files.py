"""Function calls inlined by ONNX Runtime, and graphs that are constant-folded completely."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from partita.check.gate import check
from partita.check.requirements import parse_requirement
from partita.compare.reports import compare
from partita.explain import Explanation, find, headline
from partita.observations.facts import AssignedNode, SessionFacts
from partita.options.reports import CheckOptions
from partita.partition_reports.outcome import headline as outcome_of
from partita.partition_reports.outcome import state_name
from partita.partition_reports.records import NodePlacement, Report
from tests.partition_reports.report_changes import each_node
from tests.partition_reports.samples import (
    CPU,
    GPU,
    GPU_CHAIN,
    event,
    exported,
    failed,
    report_of,
    run_facts,
    session_facts,
    top,
    windows,
)

PARTS = (
    ("_inlfunc_Part_first", "Relu", GPU),
    ("_inlfunc_Part_second", "Det", CPU),
    ("_inlfunc_Part_third", "Exp", GPU),
)
RUN = (PARTS[0], ("Memcpy", "MemcpyToHost", GPU), PARTS[1], ("Memcpy_token_1", "MemcpyFromHost", GPU), PARTS[2])
OPTIMISED = (
    exported("_inlfunc_Part_first", ("x",), ("_inlfunc_Part_a",)),
    exported("Memcpy", ("_inlfunc_Part_a",), ("_inlfunc_Part_a_CPU",)),
    exported("_inlfunc_Part_second", ("_inlfunc_Part_a_CPU",), ("_inlfunc_Part_b",)),
    exported("Memcpy_token_1", ("_inlfunc_Part_b",), ("_inlfunc_Part_b_GPU",)),
    exported("_inlfunc_Part_third", ("_inlfunc_Part_b_GPU",), ("z",)),
    exported("last", ("z",), ("y",)),
)


WORDS = {"webgpu": GPU, "cpu": CPU}.__getitem__


def a_function(**changes: Any) -> SessionFacts:
    """A call of a function with three nodes, the second of which the provider does not have, and a node after it."""
    ran = (*RUN, ("last", "Neg", GPU))
    graph = (replace(exported("call", ("x",), ("z",)), op_type="Part", domain="local"), OPTIMISED[-1])
    ops = {name: op for name, op, _ in ran}
    given: dict[str, Any] = {
        "phases": ("run",),
        "graph": graph,
        "optimised": tuple(replace(node, op_type=ops[node.name]) for node in OPTIMISED),
        "plan": (tuple(name for name, _, _ in ran),),
        "events": tuple(event(0, order, *entry, host_us=100, output_bytes=8) for order, entry in enumerate(ran)),
        "assigned": tuple(AssignedNode(name, op, "", where, 0) for name, op, where in ran if "Memcpy" not in name),
        "runs": windows("run"),
        "registered": (GPU, CPU),
    }
    return session_facts(**(given | changes))


def report_on(facts: SessionFacts) -> Report:
    return report_of(run_facts(facts, steps=(), finish_reason=None), chain=GPU_CHAIN, package=None)


@pytest.fixture
def unfolded() -> Report:
    return report_on(a_function())


@pytest.fixture
def folded() -> Report:
    """Two nodes of the file, and a plan without one."""
    return report_on(a_function(plan=(), events=(), assigned=(), optimised=()))


def outcome(report: Report, requirement: str) -> tuple[bool, str]:
    result = check(report, CheckOptions(), "r.json", None, [parse_requirement(requirement, WORDS)])
    return result.passed, "; ".join(entry.detail for entry in result.outcomes)


def test_every_inlined_function_node_replaces_its_call(unfolded: Report):
    (phase,) = unfolded.phases
    assert {node.name for node in phase.nodes if node.replaces == ("call",)} == {name for name, _, _ in PARTS}


@pytest.mark.parametrize("optimised", [True, False])
def test_function_split_across_providers_fails_requirement(optimised: bool):
    report = report_on(a_function() if optimised else a_function(optimised=None))
    held, said = outcome(report, "provider=webgpu,share>=1")
    assert not held and "share 0.5 in run, without call (Part in _inlfunc_Part_second on CPU" in said
    held, said = outcome(report, "op=Part,provider=webgpu,share>=1")
    assert not held and "share 0 " in said, "its operator is that of the file"
    assert outcome(report, "op=Part,nodes=1")[0]


def test_calls_of_same_function_need_optimised_graph_to_be_matched():
    again = replace(exported("again", ("x",), ("w",)), op_type="Part", domain="local")
    facts = a_function(optimised=None)
    report = report_on(replace(facts, graph=(*facts.graph, again)))
    assert not any(node.replaces for node in report.phases[0].nodes)


def test_function_call_explanation_covers_all_inlined_nodes(unfolded: Report):
    told = find(unfolded, "call")
    assert isinstance(told, Explanation)
    assert [place.provider for place in told.places] == [GPU, CPU, GPU]
    assert "2 on WebGpu and 1 on CPU" in headline(told)


def test_inlined_function_node_has_its_own_fallback(unfolded: Report):
    (entry,) = unfolded.fallbacks
    assert (entry.node, entry.op_type, entry.provider) == ("_inlfunc_Part_second", "Det", CPU)


def test_fully_folded_graph_has_state_empty_and_no_fallbacks(folded: Report):
    (phase,) = folded.phases
    assert (phase.nodes, phase.folded_nodes, folded.fallbacks, folded.conflicts) == ((), 2, (), ())
    assert failed(folded) == []
    assert state_name(folded) == "empty"
    assert outcome_of(folded) == "ONNX Runtime folded the whole graph at load time; nothing executes"
    assert not {"fallbacks", "remedy", "placement"} & set(top(folded))


@pytest.mark.parametrize("requirement", ["provider=webgpu,share>=1", "copies<=0"])
def test_share_and_copy_requirements_hold_for_fully_folded_graph(folded: Report, requirement: str):
    assert outcome(folded, requirement)[0]


def test_node_requirement_fails_for_fully_folded_graph(folded: Report):
    assert not outcome(folded, "provider=webgpu,nodes>=1")[0]


def test_limits_and_baseline_accept_fully_folded_graph(folded: Report):
    assert check(folded, CheckOptions(max_cpu_nodes=0, max_copies=0), "r.json", ("a.json", folded)).passed
    assert not compare(folded, folded, names=("a.json", "b.json")).unrelated_reason


def test_missing_plan_is_not_treated_as_empty_graph():
    report = report_on(a_function(plan=None, events=(), assigned=(), optimised=None))
    assert state_name(report) != "empty"
    assert report.phases[0].folded_nodes is None and report.phases[0].nodes


def test_baseline_counts_moved_function_as_a_single_node(unfolded: Report):
    def on_gpu(node: NodePlacement) -> NodePlacement:
        return node.model_copy(update={"provider": GPU})

    result = check(unfolded, CheckOptions(), "b", ("a", each_node(unfolded, on_gpu)))
    (nodes,) = (entry for entry in result.outcomes if entry.check == "--baseline: nodes")
    assert not nodes.met and nodes.detail.startswith("1 node: ")


def test_function_call_partly_on_cpu_is_not_counted_as_gpu_node(unfolded: Report):
    (phase,) = unfolded.phases
    (on_gpu,) = [entry for entry in phase.providers if entry.provider == GPU]
    assert on_gpu.nodes == 1, "the node after the call, which has a node on the CPU"
