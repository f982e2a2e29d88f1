"""A run on WebGPU and CPU: partitions, copies, fallbacks and conflicting sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.partition_reports.samples import (
    CPU,
    GPU,
    GPU_CHAIN,
    MIXED_PLAN,
    NO_KERNEL,
    failed,
    mixed_facts,
    mixed_session,
    phase_of,
    report_of,
    run_facts,
)


@pytest.fixture(scope="module")
def report():
    return report_of(mixed_facts(), GPU_CHAIN)


def test_partitions_are_maximal_runs_in_execution_order(report):
    parts = phase_of(report, "decode").partitions
    spans = [(part.provider, part.first_position, part.nodes) for part in parts]
    assert spans == [(GPU, 0, 2), (CPU, 2, 2), (GPU, 4, 4), (CPU, 8, 2), (GPU, 10, 3)]


def test_fallback_reasons_match_their_evidence(report):
    decode = {entry.node: entry for entry in report.fallbacks if entry.phase == "decode"}
    assert {name: (entry.reason, entry.evidence_kind) for name, entry in decode.items()} == {
        "model.rotary_emb/Gather": ("no_kernel_op", "logged"),
        "model.rotary_emb/Concat": ("cpu_preferred", "logged"),
        "model.layers.0.self_attn/Det": ("unexplained", "none"),
        "Transpose_token_4": ("runtime_inserted", "derived"),
    }
    gather = decode["model.rotary_emb/Gather"]
    assert gather.evidence == NO_KERNEL
    assert (gather.source_line, gather.module) == ("modeling_llama.py:88", "model.rotary_emb")
    assert len(report.fallbacks) == 8, "both phases"


def test_memcpy_node_counts_in_layer_of_its_cause(report):
    for phase in report.phases:
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


NAMES = tuple(name for name, _, _ in MIXED_PLAN)


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
    facts = mixed_facts(plan=((*(name for name, _, _ in MIXED_PLAN), "ghost"),))
    report = report_of(facts, GPU_CHAIN)
    ghost = phase_of(report, "decode").nodes[-1]
    assert (ghost.name, ghost.provider, ghost.sources) == ("ghost", None, ("plan_file",))
    assert ("ghost", "no source names a provider for this node") in {(d.node, d.detail) for d in report.conflicts}
    assert "decode: every node has a provider" in failed(report)
    assert "model.onnx: every plan node was executed" in failed(report)
    assert phase_of(report, "decode").partitions[-1].provider == "unknown"
