"""File nodes behind each executed node, in recorded sessions and in small graphs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita.diagnosis.explanation import find_fallbacks, nodes_to_probe
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import AssignedNode, GraphNode, PortFact, SessionFacts
from partita.partition_reports.placement import find_subgraphs
from tests.partition_reports.samples import (
    CPU,
    GPU,
    GPU_CHAIN,
    event,
    failed,
    phase_of,
    report_of,
    run_facts,
    session_facts,
    windows,
)

CASES = tomllib.loads((Path(__file__).parent / "joins.toml").read_text("utf-8"))["case"]
NODE = re.compile(r"(?P<name>\S+) = ((?P<domain>\S+):)?(?P<op>\w+)\((?P<inputs>.*)\) -> (?P<outputs>.*)")
NPU = "QNNExecutionProvider"
IN = PortFact("x", "input", "input", "Cpu", "Cpu", 64)
OUT = PortFact("y", "output", "output", "Cpu", "Cpu", 64)


def names(text: str) -> tuple[str, ...]:
    return tuple("" if each == "-" else each for each in text.split())


def nodes(text: str) -> tuple[GraphNode, ...]:
    found = [match for match in map(NODE.fullmatch, text.splitlines()) if match]
    assert len(found) == len(text.splitlines())
    return tuple(
        GraphNode("".join(names(name)), op, domain or "", names(inputs), names(outputs))
        for name, domain, op, inputs, outputs in (
            each.group("name", "domain", "op", "inputs", "outputs") for each in found
        )
    )


def facts_of(case: dict[str, Any]) -> SessionFacts:
    """The facts of a recorded case, without times."""
    listed = []
    for name, op, provider, entry in map(str.split, case["listed"].splitlines()):
        domain, _, op_type = op.rpartition(":")
        listed.append(AssignedNode("" if name == "-" else name, op_type, domain, provider, int(entry)))
    return session_facts(
        graph=nodes(case["file"]),
        optimised=nodes(case["optimised"]) if "optimised" in case else None,
        plan=tuple(names(line) for line in case["plan"].splitlines()),
        assigned=tuple(listed),
        events=tuple(event(0, at, *line.split()) for at, line in enumerate(case["ran"].splitlines())),
        ports=tuple(PortFact(name, "input", "input", "Cpu", "Cpu", 64) for name in names(case["inputs"])),
    )


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_executed_nodes_of_recorded_sessions_match_file_nodes(case: dict[str, Any]) -> None:
    index = SessionIndex(facts_of(case))
    found = [f"{name} <- {' '.join(behind)}" for name, behind in index.file_nodes_of.items()]
    found += [f"{name} + {' '.join(behind)}" for name, behind in index.rewritten_with.items()]
    assert sorted(found) == sorted(case["expected"].splitlines())


def node(name: str, inputs: str, outputs: str, op: str | None = None) -> GraphNode:
    """A node; the operator is read off its name unless given."""
    module, slash, kind = name.rpartition("/")
    op = op or kind.rstrip("_0123456789")
    return GraphNode(name, op, "", tuple(inputs.split()), tuple(outputs.split()), module if slash else None)


def index_of(
    graph: Iterable[GraphNode],
    optimised: Sequence[GraphNode] | None = None,
    plan: Sequence[str] | None = None,
    assigned: Iterable[AssignedNode] = (),
    **changes: Any,
) -> SessionIndex:
    planned = tuple(each.name for each in optimised or ()) if plan is None else tuple(plan)
    given = changes | {"graph": tuple(graph), "optimised": optimised and tuple(optimised), "assigned": tuple(assigned)}
    return SessionIndex(session_facts(**given, plan=(planned,), ports=(IN, OUT)))


def listed(*entries: tuple[str, str]) -> list[AssignedNode]:
    """The assignment list: provider, and names of the nodes of one entry."""
    return [
        AssignedNode(name, name.rpartition("/")[2], "", provider, number)
        for number, (provider, names) in enumerate(entries)
        for name in names.split()
    ]


def test_fused_subgraph_node_has_reason_and_replaced_nodes():
    """The list follows the first fusions: MatMul and Add in a branch are `mm/MatMulAddFusion` in it."""
    graph = (node("if", "c", "y", "If"),)
    inner = (node("mm", "h w", "t", "MatMul"), node("add", "t b", "u", "Add"), node("neg", "u", "v", "Neg"))
    placed = {"if": GPU, "mm/MatMulAddFusion": CPU, "neg": GPU, "neg/Inserted": CPU}
    entries = tuple(AssignedNode(name, "Gemm", "", home, number) for number, (name, home) in enumerate(placed.items()))
    index = index_of(graph, plan=("if",), assigned=entries, subgraph_nodes=inner)
    assert [entry.node for entry in find_fallbacks(index, "run", GPU_CHAIN)] == ["mm/MatMulAddFusion", "neg/Inserted"]
    assert nodes_to_probe(index, GPU_CHAIN, GPU_CHAIN[0]) == ("mm",), "it is tried as the node of the file"
    bodies = find_subgraphs(index)
    assert bodies is not None
    assert {each.name: each.replaces for each in bodies.on_cpu} == {"mm/MatMulAddFusion": ("mm",), "neg/Inserted": ()}


# --- regions with several executed nodes ------------------------------------------------------------------------------


@pytest.mark.parametrize("called", [("b_nchwc", "c_nchwc", "d_nchwc"), ("one", "two", "three")])
def test_branches_in_another_order_are_matched_only_by_name(called):
    """Residual block: ONNX Runtime computes the shortcut's Conv last, fused with the sum."""
    first, last = node("Relu_0", "x", "a"), node("Neg_5", "e", "y")
    graph = (
        first,
        node("Conv_1", "a u", "d"),
        node("Conv_2", "a v", "b"),
        node("Conv_3", "b w", "c"),
        node("Add_4", "d c", "e"),
        last,
    )
    runs = (
        first,
        node("ReorderInput", "a", "r0"),
        node(called[0], "r0 v_blocked", "r1", "Conv"),
        node(called[1], "r1 w_blocked", "r2", "Conv"),
        node(called[2], "r0 u_blocked none r2", "r3", "Conv"),
        node("ReorderOutput", "r3", "e"),
        last,
    )
    index = index_of(graph, runs)
    told = [index.replaces(name) for name in called]
    if called[0] == "b_nchwc":
        assert told == [("Conv_2",), ("Conv_3",), ("Conv_1", "Add_4")]
    else:
        assert told == [(), (), ()], "in order, nodes would read what their exported nodes do not: nothing is said"


def test_nodes_added_around_pinned_nodes_are_inserted():
    graph = (node("enc/MatMul", "x w", "m"), node("enc/Add", "m b", "a"), node("act/Relu", "a", "y"))
    runs = (
        node("gemm_input_reshape", "x shape", "g0", "Reshape"),
        node("enc/MatMul/MatMulAddFusion", "g0 w b", "g1", "Gemm"),
        node("gemm_output_reshape", "g1 shape_back", "a", "Reshape"),
        node("act/Relu", "a", "y"),
    )
    entries = listed(*((CPU, each.name) for each in runs))
    index = index_of(graph, runs, assigned=entries, pins={"enc/MatMul": "cpu:enc"})
    found = {each.node: each.reason for each in find_fallbacks(index, "run", GPU_CHAIN)}
    assert found["gemm_input_reshape"] == found["gemm_output_reshape"] == "runtime_inserted"
    assert found["enc/MatMul/MatMulAddFusion"] == "pinned_by_user"
    assert found["act/Relu"] == "unexplained", "which is not pinned"


# --- without an optimised graph ---------------------------------------------------------------------------------------

POOL = (node("first", "x", "h", "Neg"), node("pool", "h", "p", "MaxPool"), node("last", "p", "y", "Neg"))
REORDERED = [("ReorderInput", "ReorderInput"), ("p_nchwc", "MaxPool"), ("ReorderOutput", "ReorderOutput")]


def index_of_run(graph: Sequence[GraphNode], *runs: tuple[str, str], provider: str = CPU) -> SessionIndex:
    """A session with all of `graph` on a provider. `runs`: name and operator of the nodes that ran on the CPU."""
    entries = (AssignedNode(each.name, each.op_type, "", provider, number) for number, each in enumerate(graph))
    events = tuple(event(0, place, name, op, CPU) for place, (name, op) in enumerate(runs))
    return index_of(graph, plan=[name for name, _ in runs], assigned=entries, events=events)


@pytest.mark.parametrize("called", [("a", "b"), ("pool_token_1", "pool_token_2")])
def test_ambiguous_nodes_are_unmatched(called):
    index = index_of_run(POOL, ("first", "Neg"), *((name, "MaxPool") for name in called), ("last", "Neg"))
    assert not index.file_nodes_of


def test_unmatched_node_of_a_fusion_is_ambiguous():
    """SiLU: the name of the QuickGelu shows that it replaces the Mul, and nothing where the Sigmoid is."""
    graph = (
        node("conv", "x", "c", "Conv"),
        node("sig", "c", "s", "Sigmoid"),
        node("mul", "c s", "m", "Mul"),
        node("last", "m", "y", "Neg"),
    )
    gelu = ("mul/QuickGeluFusion/", "QuickGelu")
    index = index_of_run(graph, REORDERED[0], ("c_nchwc", "Conv"), gelu, REORDERED[2], ("last", "Neg"))
    assert (index.replaces("c_nchwc"), index.replaces("mul/QuickGeluFusion/")) == (("conv",), ("mul",))
    assert index.is_added("ReorderInput") and index.replacement_candidates == {"sig": ()}


def test_node_of_another_provider_is_unmatched():
    runs = (("first", "Neg"), *REORDERED, ("last", "Neg"))
    assert index_of_run(POOL, *runs).replaces("p_nchwc") == ("pool",)
    assert not index_of_run(POOL, *runs, provider=NPU).replaces("p_nchwc")


# --- compiled subgraphs -----------------------------------------------------------------------------------------------

CHAIN = (
    node("m.a/Add", "x b", "s"),
    node("m.ln/LayerNormalization", "s g", "l"),
    node("m.fc/MatMul", "l w", "h"),
    node("m.out/Relu", "h", "y"),
)
COMPILED = (f"{NPU}_{NPU}_77_1_10", "m.ln/LayerNormalization", f"{NPU}_{NPU}_77_0_9")
ENTRIES = listed((NPU, "m.a/Add"), (CPU, "m.ln/LayerNormalization"), (NPU, "m.fc/MatMul m.out/Relu"))


def test_compiled_subgraphs_are_matched_by_number():
    index = index_of(CHAIN, plan=COMPILED, assigned=ENTRIES)
    assert index.replaces(COMPILED[2]) == ("m.a/Add",), "9 comes before 10"
    assert index.replaces(COMPILED[0]) == ("m.fc/MatMul", "m.out/Relu")
    assert index.replaces("m.ln/LayerNormalization") == ()
    assert index.providers_by_source[COMPILED[0]] == {"assignment": frozenset({NPU})}, "known without a profile"


@pytest.mark.parametrize("entries", [["m.a/Add m.fc/MatMul m.out/Relu"], ["m.a/Add", "m.fc/MatMul", "m.out/Relu"]])
def test_unequal_entry_and_node_counts_yield_no_match(entries):
    index = index_of(CHAIN, plan=COMPILED, assigned=listed(*((NPU, entry) for entry in entries)))
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
    entries = listed((NPU, "DequantizeLinear_token_3 conv/Conv_token_1 out/QuantizeLinear"))
    entries = [replace(each, op_type="Conv") if "Conv" in each.name else each for each in entries]
    plan = ("in/QuantizeLinear", f"{NPU}_part_0", "DequantizeLinear_token_4")
    index = index_of(graph, plan=plan, assigned=entries)
    assert index.replaces(plan[1]) == ("conv/Conv", "out/QuantizeLinear", "in/DequantizeLinear")
    on_cpu = [replace(each, provider=CPU) if "Conv" in each.name else each for each in entries]
    index = index_of(graph, plan=(plan[0], "conv/Conv_token_1", *plan[1:]), assigned=on_cpu)
    assert index.replaces(plan[1]) == ("out/QuantizeLinear",)


def test_report_counts_operators_of_subgraphs():
    order = (COMPILED[2], COMPILED[1], COMPILED[0])
    events = tuple(
        event(run, place, name, "made-up-7", CPU if name.startswith("m.") else NPU, output_bytes=64)
        for run in range(2)
        for place, name in enumerate(order)
    )
    given: dict[str, Any] = {"events": events, "runs": windows("decode", "decode"), "phases": ("decode",)}
    session = index_of(CHAIN, plan=order, assigned=ENTRIES, **given).facts
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
