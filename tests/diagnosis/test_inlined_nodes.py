"""Unnamed inlined nodes: matching the different names in plan, profile, assignment list and log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from partita.diagnosis.explanation import explain_node, nodes_to_probe
from partita.diagnosis.session_index import index_session
from partita.observations.facts import AssignedNode, GraphNode, NodeEvent, NodeProbe, ProbeRun, SessionFacts
from partita.observations.log_pattern import LogPattern
from partita.observations.names import CPU
from partita.observations.records import ChainEntry
from partita.partition_reports.placement import find_conflicts
from tests.partition_reports.samples import session_facts

CUDA = "CUDAExecutionProvider"
WANTED = ChainEntry(provider=CUDA, status="active")
KERNEL = LogPattern("no_kernel_op", r"kernel not found in registries for Op type: (?P<op>\S+) node name: (?P<node>\S+)")
FORCED = LogPattern(
    "cpu_preferred", r"Force fallback to CPU execution for node: (?P<node>\S+) because (?P<why>the CPU)"
)
FORCED_LINE = "Force fallback to CPU execution for node:  because the CPU execution path is deemed faster"


def node(name: str, op_type: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> GraphNode:
    return GraphNode(name, op_type, "", inputs, outputs)


GRAPH = (
    node("crop", "CenterCropPad", ("x", "sizes"), ("cropped",)),
    node("norm", "GroupNormalization", ("x", "scale"), ("normed",)),
)


def ran(*nodes: tuple[str, str]) -> tuple[NodeEvent, ...]:
    """Events in order of execution, each by the name of the profile and the provider."""
    return tuple(
        NodeEvent(0, order, name, name.partition("_")[0], provider, order * 100, 10, 16, ("int64[2]",))
        for order, (name, provider) in enumerate(nodes)
    )


def two_streams(**changes: Any) -> SessionFacts:
    """Two functions whose nodes ran on two providers: the order of indices, of execution and of the plan all differ."""
    given: dict[str, Any] = {
        "graph": GRAPH,
        "plan": (("Shape0", "Slice0", "Shape1", "Div2"), ("Div0", "Sub0", "Div1")),
        "events": ran(
            ("Shape_34", CUDA),
            ("Div_38", CPU),
            ("Sub_39", CPU),
            ("Slice_47", CUDA),
            ("Shape_8", CUDA),
            ("Div_9", CPU),
            ("Div_23", CUDA),
        ),
        "assigned": tuple(
            AssignedNode("", op, "", provider, number)
            for number, (op, provider) in enumerate(
                (
                    ("Shape", CUDA),
                    ("Slice", CUDA),
                    ("Shape", CUDA),
                    ("Div", CUDA),
                    ("Div", CPU),
                    ("Div", CPU),
                    ("Sub", CPU),
                )
            )
        ),
        "optimised": (
            node("", "Shape", ("x",), ("all",)),
            node("", "Div", ("all", "two"), ("half",)),
            node("", "Sub", ("all", "half"), ("start",)),
            node("", "Slice", ("x", "start"), ("cropped",)),
            node("", "Shape", ("x",), ("groups",)),
            node("", "Div", ("groups", "size"), ("each",)),
            node("", "Div", ("x", "each"), ("normed",)),
        ),
        "registered": (CUDA, CPU),
        "patterns": (KERNEL, FORCED),
    }
    return session_facts(of=CUDA, **(given | changes))


def test_plan_streams_are_matched_to_executions_per_provider() -> None:
    index = index_session(two_streams())
    assert {name: event.provider for name, event in index.ran.items()} == {
        "Shape0": CUDA,
        "Slice0": CUDA,
        "Shape1": CUDA,
        "Div2": CUDA,
        "Div0": CPU,
        "Sub0": CPU,
        "Div1": CPU,
    }
    assert index.ran["Div0"].start_us == 100, "the first Div that ran on the CPU, although Div_9 has a lower index"
    assert find_conflicts(index, "run") == ()


def test_unequal_assignment_counts_are_unmatched_without_conflict() -> None:
    facts = two_streams()
    assert facts.assigned is not None
    index = index_session(replace(facts, assigned=(*facts.assigned, AssignedNode("", "Div", "", CPU, 9))))
    assert "assignment" in index.providers_by_source["Div2"]
    assert tuple(index.providers_by_source["Div0"]) == ("profile",)
    assert find_conflicts(index, "run") == ()


def test_execution_matching_no_stream_is_unmatched() -> None:
    events = (*two_streams().events, *ran(("Div_50", CPU)))
    index = index_session(two_streams(events=events, assigned=None))
    assert "Div0" not in index.ran, "four ran on two providers, and the plan has three"


def test_fewer_forced_cpu_lines_than_nodes_leave_node_unexplained() -> None:
    index = index_session(two_streams(log=(FORCED_LINE,) * 2))
    assert explain_node(index, "run", "Div0", "Div", CPU, (WANTED,)).reason == "unexplained"


@pytest.mark.parametrize(
    ("trials", "reason"),
    [
        ((ProbeRun("as_is", "", "supported", ""),), "not_claimed"),
        (
            (ProbeRun("as_is", "", "rejected", ""), ProbeRun("type", "int32 in place of int64", "supported", "")),
            "no_kernel_type",
        ),
    ],
)
def test_log_line_without_name_yields_to_probe(trials: tuple[ProbeRun, ...], reason: str) -> None:
    line = "kernel not found in registries for Op type: Sub node name:"
    index = index_session(two_streams(log=(line,), probes={"Sub0": NodeProbe("Sub0", trials)}))
    assert explain_node(index, "run", "Sub0", "Sub", CPU, (WANTED,)).reason == reason


def test_log_line_and_probe_of_function_do_not_explain_its_nodes() -> None:
    line = "kernel not found in registries for Op type: CenterCropPad node name: crop"
    probe = NodeProbe(
        "crop", (ProbeRun("as_is", "", "rejected", line), ProbeRun("type", "int32 in place of int64", "rejected", ""))
    )
    index = index_session(two_streams(log=(line,), probes={"crop": probe}))
    told = explain_node(index, "run", "Sub0", "Sub", CPU, (WANTED,))
    assert told.reason == "unexplained"
    assert "CenterCropPad" not in told.evidence


def test_unnamed_nodes_are_probed_directly() -> None:
    index = index_session(two_streams())
    assert set(nodes_to_probe(index, (WANTED,), WANTED)) == {"Div0", "Sub0", "Div1"}
    assert index.possible_functions["Div1"] == ("norm",)


def test_every_removed_function_is_possible_without_optimised_graph() -> None:
    index = index_session(two_streams(optimised=None))
    assert index.replaces("Div1") == ()
    assert index.possible_functions["Div1"] == ("crop", "norm")


def test_numbered_fused_or_inserted_node_is_named() -> None:
    facts = session_facts(
        graph=GRAPH, plan=(("LayerNormalization_token_3", "cast_to12", "Gelu0"),), events=ran(("cast_to12", CPU))
    )
    assert tuple(index_session(facts).possible_functions) == ("Gelu0",)


def test_file_node_named_memcpy_is_no_copy() -> None:
    facts = session_facts(
        graph=(node("Memcpy", "Relu", ("x",), ("y",)),),
        plan=(("Memcpy", "Memcpy_token_0"),),
        log=("[I:onnxruntime:, transformer_memcpy.cc:1 x] Add MemcpyToHost after y for CUDAExecutionProvider",),
        events=(
            NodeEvent(0, 0, "Memcpy", "Relu", CUDA, 0, 10, 16, ()),
            NodeEvent(0, 1, "Memcpy_token_0", "MemcpyToHost", CUDA, 100, 10, 16, ()),
        ),
    )
    index = index_session(facts)
    assert find_conflicts(index, "run") == ()
    assert {name: line.tensor for name, line in index.memcpy.items()} == {"Memcpy_token_0": "y"}


def not_run(**changes: Any) -> SessionFacts:
    """Two casts of a function that was unfolded, one of three that are listed being gone; nothing ran."""
    given: dict[str, Any] = {
        "events": (),
        "optimised": None,
        "plan": (("Cast0", "Cast1", "fused/"),),
        "assigned": tuple(AssignedNode("", "Cast", "", CUDA, number) for number in range(3)),
    }
    return two_streams(**(given | changes))


def test_nodes_listed_on_a_single_provider_are_placed_without_run() -> None:
    index = index_session(not_run())
    assert index.providers_by_source["Cast0"] == index.providers_by_source["Cast1"] == {"assignment": frozenset({CUDA})}
    assert index.providers_by_source["fused/"] == {}


def test_fewer_listed_than_planned_nodes_are_unplaced_without_run() -> None:
    index = index_session(not_run(assigned=(AssignedNode("", "Cast", "", CUDA, 0),)))
    assert index.providers_by_source["Cast0"] == {}


def test_every_planned_node_is_on_cpu_if_only_cpu_is_registered() -> None:
    index = index_session(not_run(assigned=(), registered=(CPU,)))
    assert {name: set(*claims.values()) for name, claims in index.providers_by_source.items()} == {
        name: {CPU} for name in ("Cast0", "Cast1", "fused/")
    }
