"""The report of a recorded ONNX Runtime run: its checks pass and its groups, sizes and times are consistent."""

from __future__ import annotations

import pytest

from tests.partition_reports.samples import failed, phase_of, recorded_facts, report_of

NAMES = ("prefill", "decode")


@pytest.fixture(scope="module")
def facts():
    return recorded_facts()


@pytest.fixture(scope="module")
def report(facts):
    return report_of(facts)


def test_every_check_of_recorded_run_passes(report):
    assert failed(report) == []
    assert len(report.checks) == 6
    assert report.conflicts == ()
    assert report.fallbacks == ()


def test_nodes_are_grouped_by_layer_and_module(report):
    phase = phase_of(report, "decode")
    assert [group.name for group in phase.by_layer] == [
        *("before the layers", "layer 0", "layer 1", "between the layers", "after the layers")
    ]
    modules = {group.name for group in phase.by_module}
    assert {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "norm", "lm_head"} <= modules
    attention = [node for node in phase.nodes if node.op_type == "GroupQueryAttention"]
    assert [node.layer for node in attention] == [0, 1]


def test_output_bytes_depend_on_tokens_of_the_phase(report):
    """Prefill handles 5 tokens at once, decode one; hidden size 128 in float32."""
    sizes = {name: phase_of(report, name).nodes[1].output_bytes for name in NAMES}
    assert phase_of(report, "decode").nodes[1].name == "model.embed_tokens/Gather"
    assert sizes == {"prefill": 5 * 128 * 4, "decode": 128 * 4}


def test_first_decode_run_is_excluded_as_warm_up(facts, report):
    phase = phase_of(report, "decode")
    second = {event.name: event.host_us for event in facts.sessions[0].events if event.run == 2}
    assert {node.name: node.host_us_per_run for node in phase.nodes} == second
    assert phase.observed_runs == 2
    assert "excluding the warm-up run" in phase.timing_note


def test_sources_list_availability_and_coverage(report):
    said = {entry.source: entry for entry in report.sources}
    assert said["model_file"].covers == "125 nodes"
    assert said["assignment"].covers == "119 nodes"
    assert {name for name, entry in said.items() if not entry.available} == {"optimised_model", "probe"}
