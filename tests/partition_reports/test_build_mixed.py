"""Reports of a run on WebGPU and CPU and of a recorded run on the CPU: sizes, times, layers, conflicting sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.partition_reports.samples import (
    CPU,
    GPU,
    GPU_CHAIN,
    MIXED_PLAN,
    failed,
    mixed_facts,
    mixed_session,
    phase_of,
    recorded_facts,
    report_of,
    run_facts,
)

NAMES = tuple(name for name, _, _ in MIXED_PLAN)


def test_memcpy_node_counts_in_layer_of_its_cause():
    for phase in report_of(mixed_facts(), GPU_CHAIN).phases:
        layers = {node.name: node.layer for node in phase.nodes}
        causes = {copy.name: copy.caused_by for copy in phase.copies}
        assert causes["Memcpy"] == ("model.layers.0.self_attn/Det",) and layers["Memcpy"] == 0
        assert layers["Memcpy_token_1"] == 0
        assert causes["Memcpy_token_0"] == ("model.rotary_emb/Concat",) and layers["Memcpy_token_0"] is None
        counted = {entry.name: (entry.nodes, entry.added_nodes) for entry in phase.by_layer}
        assert counted == {
            "before the layers": (5, 1),
            "layer 0": (3, 2),
            "between the layers": (0, 1),
            "after the layers": (1, 0),
        }


def test_profile_wins_on_conflicting_sources():
    session = mixed_session()
    wrong = tuple(
        replace(node, provider=GPU) if node.name == "model.layers.0.self_attn/Det" else node
        for node in session.assigned or ()
    )
    report = report_of(run_facts(replace(session, assigned=wrong)), GPU_CHAIN)
    assert {(entry.node, entry.detail, entry.sources) for entry in report.conflicts} == {
        ("model.layers.0.self_attn/Det", f"profile: {CPU}; assignment: {GPU}", ("profile", "assignment"))
    }
    node = next(n for n in phase_of(report, "decode").nodes if n.name == "model.layers.0.self_attn/Det")
    assert node.provider == CPU


@pytest.mark.parametrize(
    ("changes", "chain", "names"),
    [
        ({"plan": (NAMES[:-1],)}, GPU_CHAIN, ["model.onnx: every executed node is in the plan"]),
        ({}, GPU_CHAIN[:1], [f"{name}: every node is on a provider of the chain" for name in ("prefill", "decode")]),
    ],
    ids=["executed node outside the plan", "outside the chain"],
)
def test_contradictory_facts_fail_their_check(changes, chain, names):
    report = report_of(mixed_facts(**changes), chain)
    assert [name for name in failed(report) if name in names] == names
    assert {node.name for phase in report.phases for node in phase.nodes} <= set(NAMES)


def test_node_without_known_provider_is_a_conflict():
    report = report_of(mixed_facts(plan=((*NAMES, "ghost"),)), GPU_CHAIN)
    ghost = phase_of(report, "decode").nodes[-1]
    assert (ghost.name, ghost.provider, ghost.sources) == ("ghost", None, ("plan_file",))
    assert ("ghost", "no source names a provider for this node") in {(d.node, d.detail) for d in report.conflicts}
    assert {"decode: every node has a provider", "model.onnx: every plan node was executed"} <= {*failed(report)}
    assert phase_of(report, "decode").partitions[-1].provider == "unknown"


def test_recorded_run_has_sizes_times_and_layers_of_each_phase():
    facts = recorded_facts()
    report = report_of(facts)
    assert (failed(report), len(report.checks), report.conflicts, report.fallbacks) == ([], 6, (), ())
    prefill, decode = report.phases
    assert [group.name for group in decode.by_layer] == [
        *("before the layers", "layer 0", "layer 1", "between the layers", "after the layers")
    ]
    modules = {group.name for group in decode.by_module}
    assert {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "norm", "lm_head"} <= modules
    assert [node.layer for node in decode.nodes if node.op_type == "GroupQueryAttention"] == [0, 1]
    # Prefill handles 5 tokens at once, decode one; hidden size 128 in float32.
    assert decode.nodes[1].name == "model.embed_tokens/Gather"
    assert [phase.nodes[1].output_bytes for phase in (prefill, decode)] == [5 * 128 * 4, 128 * 4]
    second = {event.name: event.host_us for event in facts.sessions[0].events if event.run == 2}
    assert {node.name: node.host_us_per_run for node in decode.nodes} == second, "the first run is a warm-up"
    assert decode.observed_runs == 2 and "excluding the warm-up run" in decode.timing_note
    said = {entry.source: entry for entry in report.sources}
    assert (said["model_file"].covers, said["assignment"].covers) == ("125 nodes", "119 nodes")
    assert {name for name, entry in said.items() if not entry.available} == {"optimised_model", "probe"}
