"""Causes of copies and costs of a placement: per run, per token and per fallback."""

from __future__ import annotations

from typing import Any

import pytest

from partita.observations.facts import GraphNode, PortFact
from partita.partition_reports.phase_records import Phase, PhaseCost
from tests.partition_reports.report_changes import each_phase, mixed, with_cost
from tests.partition_reports.samples import (
    GPU_CHAIN,
    MIXED_PLAN,
    PACKAGE,
    event,
    failed,
    mixed_facts,
    phase_of,
    report_of,
    shown,
)

DET = "model.layers.0.self_attn/Det"
CONCAT, GATHER = "model.rotary_emb/Concat", "model.rotary_emb/Gather"
TENSORS = {
    "model.embed_tokens/Gather": ("embedding input_ids", "hidden"),
    "model.rotary_emb/Shape": ("input_ids", "shape"),
    GATHER: ("shape zero", "batch"),
    CONCAT: ("batch", "wide"),
    "Memcpy_token_0": ("wide", "wide_Device"),
    "model.rotary_emb/Expand": ("hidden wide_Device", "expanded"),
    "model.layers.0.self_attn.q_proj/MatMul": ("expanded q", "query_Device"),
    "Memcpy": ("query_Device", "query"),
    DET: ("query", "det"),
    "Transpose_token_4": ("det", "turned"),
    "Memcpy_token_1": ("turned", "turned_Device"),
    "model.layers.0.mlp/Mul": ("turned_Device expanded", "scaled"),
    "lm_head/MatMul": ("scaled head", "logits"),
}
"""Inputs and outputs of the mixed sample's graph as it runs."""


def optimised(**changes: tuple[str, str]) -> tuple[GraphNode, ...]:
    """The mixed sample's graph as it runs; `changes`: inputs and outputs of a node."""
    rows = {name: (op, *TENSORS[name]) for name, op, _ in MIXED_PLAN}
    rows |= {name: (rows[name][0], *tensors) for name, tensors in changes.items()}
    return tuple(
        GraphNode(name, op, "", tuple(inputs.split()), tuple(outputs.split()))
        for name, (op, inputs, outputs) in rows.items()
    )


def report_with(graph=None, **changes):
    return report_of(mixed_facts(optimised=optimised() if graph is None else graph, **changes), GPU_CHAIN)


def copies_of(report):
    return {copy.name: copy for copy in phase_of(report, "decode").copies}


def cost_of(phase: Phase) -> PhaseCost:
    assert phase.cost is not None
    return phase.cost


def costs_of(report):
    return {entry.node: entry.cost for entry in report.fallbacks if entry.phase == "decode"}


def test_copy_cause_is_the_host_node_reading_or_writing_the_tensor():
    copies = copies_of(report_with())
    assert (copies["Memcpy"].tensor, copies["Memcpy"].caused_by) == ("query", (DET,))
    assert copies["Memcpy_token_0"].caused_by == (CONCAT,)
    assert copies["Memcpy_token_1"].caused_by == ("Transpose_token_4",), "a tensor that the file does not have"
    copies = copies_of(report_of(mixed_facts(), GPU_CHAIN))
    causes = [copies[name].caused_by for name in ("Memcpy", "Memcpy_token_0", "Memcpy_token_1")]
    assert causes == [(DET,), (CONCAT,), (DET,)], "from the log, without an optimised graph"


def test_copy_without_log_and_optimised_graph_has_no_cause():
    report = report_of(mixed_facts(log=()), GPU_CHAIN)
    assert copies_of(report)["Memcpy"].caused_by == ()
    assert copies_of(report)["Memcpy"].cause_missing_reason == "no source names its tensor"
    assert failed(report) == []
    assert "unknown: no source names its tensor" in " ".join(shown(report).split())
    assert costs_of(report)[DET].harmless is None, "it may be the cause of any of them"


def test_copy_of_device_only_constant_has_no_causing_node():
    copy = copies_of(report_with(optimised(Memcpy_token_0=("table", "table_Device"))))["Memcpy_token_0"]
    assert copy.caused_by == () and "table" in copy.cause_missing_reason and "constant" in copy.cause_missing_reason


def test_phase_cost_sums_partitions_and_copies_per_run_and_token():
    cost = cost_of(phase_of(report_with(), "decode"))
    assert (cost.partitions, cost.copies) == (5, 4)
    assert cost.copy_bytes_per_run == cost.copy_bytes_at_least == 3 * 512 + 8
    assert cost.host_wait_us_per_run == 3 * 100
    assert (cost.tokens_per_run, cost.copy_bytes_per_token, cost.host_wait_us_per_token) == (1, 1544, 300)
    report = report_of(mixed_facts(), GPU_CHAIN, package=PACKAGE.model_copy(update={"batch_size": 4}))
    assert [cost_of(phase).tokens_per_run for phase in report.phases] == [20, 4], "of every row of the batch"
    assert cost_of(phase_of(report, "decode")).host_wait_us_per_token == 300 / 4


def test_fallback_with_copies_is_not_harmless():
    cost = costs_of(report_of(mixed_facts(), GPU_CHAIN))[DET]
    assert cost.copies == ("Memcpy", "Memcpy_token_1")
    assert (cost.copy_bytes_per_run, cost.copy_wait_us_per_run) == (1024, 200)
    assert cost.harmless is False and "2 copies" in cost.harmless_reason


@pytest.mark.parametrize(("host_us", "harmless"), [(5, True), (100, False)])
def test_fallback_without_copies_is_harmless_below_time_share(host_us, harmless):
    events = tuple(
        event(run, order, name, op, provider, host_us=host_us if name == GATHER else 100)
        for run in range(4)
        for order, (name, op, provider) in enumerate(MIXED_PLAN)
    )
    cost = costs_of(report_with(events=events))[GATHER]
    assert cost.copies == () and cost.copy_bytes_per_run == 0
    assert cost.time_share == pytest.approx(host_us / (1200 + host_us))
    assert cost.harmless is harmless, cost.harmless_reason


@pytest.mark.parametrize(
    ("direction", "required", "bound", "found"),
    [
        ("input", "OpenVINO_shared_CPU", "Cpu", ["host_to_host"]),
        ("output", "OpenVINO_shared_CPU", "Cpu", []),
        ("input", "WebGPU_Buf", "Cuda", ["device_to_device"]),
        ("output", "WebGPU_Buf", "Cpu", ["device_to_host"]),
    ],
)
def test_buffer_in_unexpected_memory_counts_as_copy(direction, required, bound, found):
    """Exception: an output bound to another host memory is not copied."""
    ports = (PortFact("p", direction, "tokens", required, bound, 8),)
    copies = phase_of(report_of(mixed_facts(ports=ports), GPU_CHAIN), "decode").copies
    assert [copy.direction for copy in copies if copy.name == "p"] == found


def test_node_missing_from_plan_or_graph_is_a_conflict():
    extra = (*optimised()[:-1], GraphNode("lost", "Relu", "", ("scaled",), ("logits",)))
    found = {entry.node: entry.detail for entry in report_with(extra).conflicts}
    assert found == {
        "lm_head/MatMul": "in the plan but not in the optimised graph",
        "lost": "in the optimised graph but not in the plan",
    }


def test_sources_give_reason_for_missing_optimised_graph():
    said = {entry.source: entry for entry in report_with().sources}
    assert said["optimised_model"].available and "13 nodes" in said["optimised_model"].covers
    report = report_of(mixed_facts(optimised_missing_reason="its weights are too large"), GPU_CHAIN)
    said = {entry.source: entry for entry in report.sources}
    assert not said["optimised_model"].available and "too large" in said["optimised_model"].covers


def test_phase_figures_show_lower_bound_of_copied_bytes() -> None:
    def lost(phase: Phase) -> dict[str, Any]:
        first, *others = phase.copies
        copies = (first.model_copy(update={"bytes_per_run": None}), *others)
        return {"copies": copies, "cost": with_cost(phase, copy_bytes_per_run=None)}

    (line,) = (row for row in shown(each_phase(mixed(), lost)).splitlines() if row.startswith("  copy bytes  "))
    assert " ".join(line.split()) == "copy bytes 1 KiB or more 1.01 KiB or more"
