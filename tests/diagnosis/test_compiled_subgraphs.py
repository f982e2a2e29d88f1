"""File nodes inside compiled subgraphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.diagnosis.test_join_regions import CHAIN, IN, NPU, OUT, index_of, listed, node
from tests.partition_reports.samples import CPU, event, failed, phase_of, report_of, run_facts, session_facts, windows

COMPILED = (f"{NPU}_{NPU}_77_1_10", "m.ln/LayerNormalization", f"{NPU}_{NPU}_77_0_9")


def test_compiled_subgraphs_are_matched_by_number():
    entries = listed((NPU, "m.a/Add"), (CPU, "m.ln/LayerNormalization"), (NPU, "m.fc/MatMul m.out/Relu"))
    index = index_of(CHAIN, plan=COMPILED, assigned=entries)
    assert index.replaces(COMPILED[2]) == ("m.a/Add",), "9 comes before 10"
    assert index.replaces(COMPILED[0]) == ("m.fc/MatMul", "m.out/Relu")
    assert index.replaces("m.ln/LayerNormalization") == ()
    assert index.providers_by_source[COMPILED[0]] == {"assignment": frozenset({NPU})}, "known without a profile"


@pytest.mark.parametrize(
    "entries",
    [
        [(NPU, "m.a/Add m.fc/MatMul m.out/Relu")],
        [(NPU, "m.a/Add"), (NPU, "m.fc/MatMul"), (NPU, "m.out/Relu")],
    ],
)
def test_unequal_entry_and_node_counts_yield_no_match(entries):
    index = index_of(CHAIN, plan=COMPILED, assigned=listed(*entries))
    assert index.compiled == {} and index.file_nodes_of == {}


def test_nodes_fused_before_compilation_belong_to_subgraph():
    graph = (*CHAIN[:3], node("m.fc/Add", "h bias", "k"), node("m.out/Relu", "k", "y"))
    entries = listed((NPU, "m.a/Add m.ln/LayerNormalization m.fc/MatMul/MatMulAddFusion m.out/Relu"))
    whole = index_of(graph, plan=(f"{NPU}_part_0",), assigned=entries)
    assert set(whole.replaces(f"{NPU}_part_0")) == {each.name for each in graph}
    cut = listed((NPU, "m.a/Add m.ln/LayerNormalization m.fc/MatMul/MatMulAddFusion"), (CPU, "m.out/Relu"))
    index = index_of(graph, plan=(f"{NPU}_part_0", "m.out/Relu"), assigned=cut)
    assert "m.fc/Add" not in index.replaces(f"{NPU}_part_0"), "its reader is elsewhere, so nobody can tell"


def test_quantised_node_in_another_layout_belongs_to_subgraph():
    """Both DequantizeLinear nodes and the Conv have new names."""
    graph = (
        node("in/QuantizeLinear", "x", "q"),
        node("in/DequantizeLinear", "q", "d"),
        node("conv/Conv", "d w", "c"),
        node("out/QuantizeLinear", "c", "o"),
        node("out/DequantizeLinear", "o", "y"),
    )
    names = "DequantizeLinear_token_3 conv/Conv_token_1 out/QuantizeLinear"
    entries = [replace(each, op_type="Conv") if "Conv" in each.name else each for each in listed((NPU, names))]
    plan = ("in/QuantizeLinear", f"{NPU}_part_0", "DequantizeLinear_token_4")
    index = index_of(graph, plan=plan, assigned=entries)
    assert index.replaces(plan[1]) == ("conv/Conv", "out/QuantizeLinear", "in/DequantizeLinear")
    on_cpu = [replace(each, provider=CPU) if "Conv" in each.name else each for each in entries]
    index = index_of(graph, plan=(plan[0], "conv/Conv_token_1", *plan[1:]), assigned=on_cpu)
    assert index.replaces(plan[1]) == ("out/QuantizeLinear",)


def test_report_counts_operators_of_subgraphs():
    entries = listed((NPU, "m.a/Add"), (CPU, "m.ln/LayerNormalization"), (NPU, "m.fc/MatMul m.out/Relu"))
    order = (COMPILED[2], COMPILED[1], COMPILED[0])
    events = tuple(
        event(run, place, name, "made-up-7", CPU if name.startswith("m.") else NPU, output_bytes=64)
        for run in range(2)
        for place, name in enumerate(order)
    )
    session = session_facts(
        graph=CHAIN,
        plan=(order,),
        assigned=tuple(entries),
        ports=(IN, OUT),
        events=events,
        runs=windows("decode", "decode"),
        phases=("decode",),
    )
    report = report_of(run_facts(session, steps=(), prompt_tokens=0, new_tokens=1), ())
    phase = phase_of(report, "decode")
    npu = next(entry for entry in phase.providers if entry.provider == NPU)
    assert (npu.executed_nodes, npu.nodes, npu.op_types) == (2, 3, {"Add": 1, "MatMul": 1, "Relu": 1})
    counted = {entry.name: (entry.nodes, entry.host_us_per_run is not None) for entry in phase.by_op_type}
    assert counted == {
        "Add": (1, True),
        "LayerNormalization": (1, True),
        "MatMul": (1, False),
        "Relu": (1, False),
        "CompiledSubgraph": (0, True),
    }, "the time of a node compiled from several operators belongs to none of them"
    assert [check for check in failed(report) if "chain" not in check] == []
