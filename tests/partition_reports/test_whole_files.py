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
from partita.partition_reports.phase_records import NodePlacement
from partita.partition_reports.records import Report
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

RUN = (
    ("_inlfunc_Part_first", "Relu", GPU),
    ("Memcpy", "MemcpyToHost", GPU),
    ("_inlfunc_Part_second", "Det", CPU),
    ("Memcpy_token_1", "MemcpyFromHost", GPU),
    ("_inlfunc_Part_third", "Exp", GPU),
    ("last", "Neg", GPU),
)
"""A call of a function with three nodes, the second of which the provider does not have, and a node after it."""
TENSORS = ("x", "_inlfunc_Part_a", "_inlfunc_Part_a_CPU", "_inlfunc_Part_b", "_inlfunc_Part_b_GPU", "z", "y")
WORDS = {"webgpu": GPU, "cpu": CPU}.__getitem__


def a_function(**changes: Any) -> SessionFacts:
    optimised = tuple(
        replace(exported(name, (TENSORS[at],), (TENSORS[at + 1],)), op_type=op) for at, (name, op, _) in enumerate(RUN)
    )
    call = replace(exported("call", ("x",), ("z",)), op_type="Part", domain="local")
    given: dict[str, Any] = {
        "phases": ("run",),
        "graph": (call, exported("last", ("z",), ("y",))),
        "optimised": optimised,
        "plan": (tuple(name for name, _, _ in RUN),),
        "events": tuple(event(0, order, *entry, host_us=100, output_bytes=8) for order, entry in enumerate(RUN)),
        "assigned": tuple(AssignedNode(name, op, "", where, 0) for name, op, where in RUN if "Memcpy" not in name),
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


@pytest.mark.parametrize("optimised", [True, False])
def test_function_split_across_providers_counts_once_and_fails_requirement(optimised: bool):
    report = report_on(a_function() if optimised else a_function(optimised=None))
    held, said = outcome(report, "provider=webgpu,share>=1")
    assert not held and "share 0.5 in run, without call (Part in _inlfunc_Part_second on CPU" in said
    held, said = outcome(report, "op=Part,provider=webgpu,share>=1")
    assert not held and "share 0 " in said, "its operator is that of the file"
    assert outcome(report, "op=Part,nodes=1")[0]
    assert {entry.provider: entry.nodes for entry in report.phases[0].providers} == {GPU: 1, CPU: 1}


def test_function_call_explanation_covers_all_inlined_nodes(unfolded: Report):
    told = find(unfolded, "call")
    assert isinstance(told, Explanation)
    assert [place.provider for place in told.places] == [GPU, CPU, GPU]
    assert "2 on WebGpu and 1 on CPU" in headline(told)


def test_fully_folded_graph_has_state_empty_and_passes_checks(folded: Report):
    (phase,) = folded.phases
    assert (phase.nodes, phase.folded_nodes, folded.fallbacks, folded.conflicts) == ((), 2, (), ())
    assert failed(folded) == []
    assert state_name(folded) == "empty"
    assert outcome_of(folded) == "ONNX Runtime folded the whole graph at load time; nothing executes"
    assert not {"fallbacks", "remedy", "placement"} & set(top(folded))
    assert outcome(folded, "provider=webgpu,share>=1")[0] and outcome(folded, "copies<=0")[0]
    assert not outcome(folded, "provider=webgpu,nodes>=1")[0]
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
