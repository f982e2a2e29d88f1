"""What the copies are there for, and what a placement costs per run, per token and per fallback."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.observations.facts import GraphNode, PortFact, StateFact
from partita.observations.records import ChainEntry
from partita.partition_reports.cost import with_costs
from partita.partition_reports.records import Subgraphs
from tests.partition_reports.samples import (
    CPU_CHAIN,
    GPU,
    GPU_CHAIN,
    MIXED_PLAN,
    PACKAGE,
    event,
    failed,
    mixed_facts,
    mixed_session,
    phase_of,
    recorded_facts,
    report_of,
    run_facts,
    shown,
    windows,
)

DET = "model.layers.0.self_attn/Det"
CONCAT, GATHER = "model.rotary_emb/Concat", "model.rotary_emb/Gather"


def optimised(*changes: tuple[str, str, str, str]) -> tuple[GraphNode, ...]:
    """The mixed sample's graph as it runs; `changes` replace or add nodes: name, operator, inputs, outputs."""
    rows = {
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
    made = {
        name: GraphNode(name, op, "", tuple(rows[name][0].split()), tuple(rows[name][1].split()))
        for name, op, _ in MIXED_PLAN
    }
    for name, op, inputs, outputs in changes:
        made[name] = GraphNode(name, op, "", tuple(inputs.split()), tuple(outputs.split()))
    return tuple(made.values())


def report_with(graph=None, **changes):
    return report_of(mixed_facts(optimised=optimised() if graph is None else graph, **changes), GPU_CHAIN)


def copies_of(report, phase: str = "decode"):
    return {copy.name: copy for copy in phase_of(report, phase).copies}


def costs_of(report, phase: str = "decode"):
    return {entry.node: entry.cost for entry in report.fallbacks if entry.phase == phase}


def cost_of(report, phase: str = "decode"):
    return phase_of(report, phase).cost


# --- causes ---------------------------------------------------------------------------------------------------------


def test_a_copy_is_there_for_its_readers_or_its_maker_on_the_host():
    copies = copies_of(report_with())
    assert (copies["Memcpy"].tensor, copies["Memcpy"].caused_by) == ("query", (DET,))
    assert copies["Memcpy_token_0"].caused_by == (CONCAT,)
    assert copies["Memcpy_token_1"].caused_by == ("Transpose_token_4",), "a tensor that the file does not have"


def test_without_the_optimised_graph_the_log_and_the_file_tell():
    copies = copies_of(report_of(mixed_facts(), GPU_CHAIN))
    assert [copies[name].caused_by for name in ("Memcpy", "Memcpy_token_0", "Memcpy_token_1")] == [
        (DET,),
        (CONCAT,),
        (DET,),
    ]


def test_without_either_the_copy_says_why_it_has_no_cause():
    report = report_of(mixed_facts(log=()), GPU_CHAIN)
    assert copies_of(report)["Memcpy"].caused_by == ()
    assert copies_of(report)["Memcpy"].cause_missing_reason == "no source names its tensor"
    assert failed(report) == []
    assert "unknown: no source names its tensor" in " ".join(shown(report).split())
    assert costs_of(report)[DET].harmless is None, "it may be the cause of any of them"


def test_a_graph_input_that_both_sides_read_is_copied_because_of_the_readers_on_the_host():
    graph = optimised(
        ("Memcpy_token_0", "MemcpyFromHost", "input_ids", "ids_Device"),
        ("model.embed_tokens/Gather", "Gather", "embedding ids_Device", "hidden"),
        ("model.rotary_emb/Shape", "Shape", "ids_Device", "shape"),
        (GATHER, "Gather", "shape input_ids", "batch"),
    )
    assert copies_of(report_with(graph))["Memcpy_token_0"].caused_by == (GATHER,)


def test_a_constant_that_only_the_device_reads_has_no_cause_among_the_nodes():
    graph = optimised(("Memcpy_token_0", "MemcpyFromHost", "table", "table_Device"))
    copy = copies_of(report_with(graph))["Memcpy_token_0"]
    assert copy.caused_by == () and "table" in copy.cause_missing_reason and "constant" in copy.cause_missing_reason


# --- what a phase costs ---------------------------------------------------------------------------------------------


def test_the_cost_of_a_phase_is_the_sum_of_its_parts():
    cost = cost_of(report_with(), "decode")
    assert (cost.partitions, cost.copies) == (5, 4)
    assert cost.crossings == 6, "hidden, shape, wide, expanded, query, turned"
    assert cost.copy_bytes_per_run == cost.copy_bytes_at_least == 3 * 512 + 8
    assert cost.host_wait_us_per_run == 3 * 100
    assert (cost.tokens_per_run, cost.copy_bytes_per_token, cost.host_wait_us_per_token) == (1, 1544, 300)


def test_tokens_count_every_row_of_one_run():
    report = report_of(mixed_facts(), GPU_CHAIN, package=PACKAGE.model_copy(update={"batch_size": 4}))
    assert [cost_of(report, name).tokens_per_run for name in ("prefill", "decode")] == [20, 4]
    assert cost_of(report).host_wait_us_per_token == 300 / 4


def test_one_unknown_size_makes_the_sum_unknown_and_not_smaller():
    cost = cost_of(report_with(), "prefill")
    assert cost.copy_bytes_per_run is None and cost.copy_bytes_per_token is None, "the prompt's size is not known"
    assert cost.copy_bytes_at_least == 3 * 512


def test_a_copied_sequence_has_no_known_size():
    """ONNX Runtime counts bytes and shapes of tensors alone: of a sequence it writes 0 bytes and no shape."""
    events = tuple(
        event(0, order, name, op, provider, **({"output_bytes": 0, "output_shapes": ()} if name == "Memcpy" else {}))
        for order, (name, op, provider) in enumerate(MIXED_PLAN)
    )
    report = report_with(events=events, runs=windows("decode"))
    assert copies_of(report)["Memcpy"].bytes_per_run is None
    assert (cost_of(report).copy_bytes_per_run, cost_of(report).copy_bytes_at_least) == (None, 2 * 512 + 8)
    borders = {each.name: each.size_bytes for part in phase_of(report, "decode").partitions for each in part.boundary}
    assert (borders["query"], borders["wide"]) == (None, 512)


def test_a_run_on_one_provider_costs_nothing():
    cost = cost_of(report_of(recorded_facts()), "decode")
    assert (cost.partitions, cost.crossings, cost.copies) == (1, 0, 0)
    assert (cost.crossing_bytes_per_run, cost.copy_bytes_per_run, cost.host_wait_us_per_run) == (0, 0, 0)


# --- what a fallback costs ------------------------------------------------------------------------------------------


def test_a_fallback_with_copies_is_not_harmless():
    cost = costs_of(report_of(mixed_facts(), GPU_CHAIN))[DET]
    assert (cost.copies, cost.copy_bytes_per_run, cost.copy_wait_us_per_run) == (
        ("Memcpy", "Memcpy_token_1"),
        1024,
        200,
    )
    assert cost.harmless is False and "2 copies" in cost.harmless_reason


@pytest.mark.parametrize(("host_us", "harmless"), [(5, True), (100, False)])
def test_a_fallback_without_copies_is_harmless_when_it_takes_next_to_no_time(host_us, harmless):
    events = tuple(
        event(run, order, name, op, provider, host_us=host_us if name == GATHER else 100)
        for run in range(4)
        for order, (name, op, provider) in enumerate(MIXED_PLAN)
    )
    cost = costs_of(report_with(events=events))[GATHER]
    assert cost.copies == () and cost.copy_bytes_per_run == 0
    assert cost.time_share == pytest.approx(host_us / (1200 + host_us))
    assert cost.harmless is harmless, cost.harmless_reason


def test_nothing_is_called_harmless_where_copies_may_be_unseen():
    events = tuple(
        event(run, order, name, op, provider, host_us=5 if name == GATHER else 100)
        for run in range(4)
        for order, (name, op, provider) in enumerate(MIXED_PLAN)
    )
    report = report_with(events=events)
    found = {}
    for unseen in (False, True):
        bodies = Subgraphs(nodes=1, copies=0, may_have_more_copies=unseen)
        phase = phase_of(report, "decode").model_copy(update={"subgraphs": bodies})
        (entry,) = (e for e in report.fallbacks if e.node == GATHER and e.phase == "decode")
        (entry,) = with_costs((entry,), phase, GPU_CHAIN[0], timed=True)
        assert entry.cost is not None
        found[unseen] = (entry.cost.harmless, "control-flow subgraphs" in entry.cost.harmless_reason)
    assert found == {False: (True, False), True: (None, True)}


def test_nothing_is_called_harmless_without_a_time():
    cost = costs_of(report_with(events=(), runs=()))[GATHER]
    assert cost.harmless is None and "time is unknown" in cost.harmless_reason


def test_nothing_is_called_harmless_when_the_provider_is_not_there():
    gone = ChainEntry(provider=GPU, status="unavailable", reason="not_in_build", evidence="no", remedy="install it")
    report = report_of(recorded_facts(), (gone, *CPU_CHAIN))
    assert {entry.cost and entry.cost.harmless for entry in report.fallbacks} == {None}
    assert all(entry.cost for entry in report.fallbacks)


def test_the_text_says_what_a_group_of_fallbacks_costs():
    text = " ".join(shown(report_of(mixed_facts(), GPU_CHAIN)).split())
    cost = "cost in decode: 2 copies (1 KiB, 0.200 ms wait, 15.4 % of the node time), the nodes themselves: 7.7 % of "
    assert f"{cost}the node time; 1 node causes copies" in text
    assert "query to host 1 512 B 0.100 model.layers.0.self_attn/Det" in text


# --- borders, sources, disagreements --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direction", "required", "bound", "found"),
    [
        ("input", "OpenVINO_shared_CPU", "Cpu", ["host_to_host"]),
        ("output", "OpenVINO_shared_CPU", "Cpu", []),
        ("input", "WebGPU_Buf", "Cuda", ["device_to_device"]),
        ("output", "WebGPU_Buf", "Cpu", ["device_to_host"]),
    ],
)
def test_a_buffer_in_other_memory_than_expected_is_copied(direction, required, bound, found):
    """An output in another memory of the host is not."""
    ports = (PortFact("p", direction, "tokens", required, bound, 8),)
    copies = phase_of(report_of(mixed_facts(ports=ports), GPU_CHAIN), "decode").copies
    assert [copy.direction for copy in copies if copy.name == "p"] == found


def test_tensors_that_only_exist_after_fusion_have_a_name_at_the_border():
    borders = {
        each.name: each.size_bytes for part in phase_of(report_with(), "decode").partitions for each in part.boundary
    }
    assert borders["turned"] == 512 and "query_Device" not in borders


def test_a_node_that_only_one_graph_has_is_a_disagreement():
    extra = (*optimised()[:-1], GraphNode("lost", "Relu", "", ("scaled",), ("logits",)))
    found = {entry.node: entry.detail for entry in report_with(extra).conflicts}
    assert found == {
        "lm_head/MatMul": "in the plan but not in the optimised graph",
        "lost": "in the optimised graph but not in the plan",
    }


def test_another_number_of_copies_in_the_log_is_a_disagreement():
    session = mixed_session()
    report = report_of(run_facts(replace(session, log=session.log[:-1])), GPU_CHAIN)
    details = {entry.detail for entry in report.conflicts}
    assert details == {"the log reports 2 inserted, the plan has 3"}
    assert report_of(run_facts(replace(session, log=())), GPU_CHAIN).conflicts == (), "a log that was not kept"


def test_sources_tell_why_there_is_no_optimised_graph():
    said = {entry.source: entry for entry in report_with().sources}
    assert said["optimised_model"].available and "13 nodes, 3 of them Memcpy" in said["optimised_model"].covers
    report = report_of(mixed_facts(optimised_missing_reason="its weights are too large"), GPU_CHAIN)
    said = {entry.source: entry for entry in report.sources}
    assert not said["optimised_model"].available and "too large" in said["optimised_model"].covers
    assert "too large" in shown(report)


def state(**changes) -> StateFact:
    return StateFact(
        **{
            "past": "past.0",
            "present": "present.0",
            "layer": 0,
            "kind": "key",
            "memory": "Cpu",
            "size_bytes": 64,
            "same_address": True,
            "address_changes": 0,
            "checked_steps": 5,
            **changes,
        }
    )


def test_the_cache_says_at_how_many_steps_it_was_checked():
    report = report_of(replace(recorded_facts(), states=(state(), state(checked_steps=4))))
    assert report.cache is not None and report.cache.checked_steps == 4
    assert "at each of 4 observed steps" in " ".join(shown(report).split())
    report = report_of(replace(recorded_facts(), states=(state(), state(checked_steps=None))))
    assert report.cache is not None and report.cache.checked_steps is None
