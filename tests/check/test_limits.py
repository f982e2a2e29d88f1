"""Placement limits: which nodes and copies count, the messages, and limits that are usage errors."""

from __future__ import annotations

import pytest

from partita.check.measures import exceeded_limits
from partita.check.requirements import Limits, check_limits
from partita.errors import UsageError
from partita.options.fields import check_fields
from partita.options.groups import PlacementLimits
from tests.partition_reports.samples import CPU, GPU, GPU_CHAIN, mixed_facts, report_of, shown


@pytest.fixture(scope="module")
def report():
    """4 nodes on the CPU and 3 Memcpy nodes in both phases; 512 bytes each, and 8 bytes of an input in decode."""
    return report_of(mixed_facts(), GPU_CHAIN)


def of(report, *phases):
    """The report with these phases."""
    return report.model_copy(update={"phases": phases})


def test_met_limits_yield_no_findings(report):
    assert exceeded_limits(report, Limits()) == ()
    assert exceeded_limits(report, Limits(max_cpu_nodes=4, max_copies=3, max_copy_bytes_per_token=3 * 512 + 8)) == ()
    assert exceeded_limits(of(report), Limits(max_cpu_nodes=0, max_copies=0, max_copy_bytes_per_token=0)) == ()


def test_exceeded_limits_name_values_and_nodes(report):
    nodes, copies, size = exceeded_limits(
        report, Limits(max_cpu_nodes=3, max_copies=2, max_copy_bytes_per_token=3 * 512 + 7)
    )
    assert nodes.startswith(f"--max-cpu-nodes 3: 4 nodes on {CPU} in decode: model.rotary_emb/Gather (Gather), ")
    assert copies == "--max-copies 2: 3 Memcpy nodes in decode: Memcpy_token_{0,1} (2), Memcpy"
    assert size == "--max-copy-bytes-per-token 1543: 1,544 bytes in 4 copies per run of model.onnx (decode)"


def test_phase_with_most_cpu_nodes_counts(report):
    prefill, decode = report.phases
    fewer = decode.model_copy(update={"nodes": tuple(node for node in decode.nodes if node.provider == GPU)})
    assert (
        " 4 nodes on CPUExecutionProvider in prefill: "
        in exceeded_limits(of(report, prefill, fewer), Limits(max_cpu_nodes=0))[0]
    )


def test_copy_of_unknown_size_exceeds_limit(report):
    decode = report.phases[1]
    unknown = decode.model_copy(
        update={
            "copies": (*decode.copies[1:], decode.copies[0].model_copy(update={"bytes_per_run": None})),
        }
    )
    (sentence,) = exceeded_limits(of(report, unknown), Limits(max_copy_bytes_per_token=10**9))
    assert "the size of 1 copy is unknown: Memcpy_token_0" in sentence
    (sentence,) = exceeded_limits(of(report, unknown), Limits(max_copy_bytes_per_token=0))
    assert "1,032 bytes in 4 copies" in sentence and "1 copy of unknown size" in sentence


def test_long_node_list_is_truncated(report):
    decode = report.phases[1]
    nodes = tuple(decode.nodes[2].model_copy(update={"name": f"n{'x' * number}"}) for number in range(30))
    (sentence,) = exceeded_limits(of(report, decode.model_copy(update={"nodes": nodes})), Limits(max_cpu_nodes=0))
    assert f"n{'x' * 5} (Gather) and 24 more" in sentence and "x" * 6 not in sentence


def test_nodes_differing_by_number_are_grouped(report):
    decode = report.phases[1]
    nodes = tuple(decode.nodes[2].model_copy(update={"name": f"layers.{number}/Add"}) for number in range(30))
    (sentence,) = exceeded_limits(of(report, decode.model_copy(update={"nodes": nodes})), Limits(max_cpu_nodes=0))
    assert sentence.endswith(": layers.{0..29}/Add (Gather) (30)")


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (PlacementLimits(max_cpu_nodes=-1), "`max_cpu_nodes`"),
        (PlacementLimits(max_copies=-1), "`max_copies`"),
        (PlacementLimits(max_copy_bytes_per_token=-5), "`max_copy_bytes_per_token` is -5"),
    ],
)
def test_negative_limit_is_a_usage_error(limits, name):
    with pytest.raises(UsageError, match=name):
        check_fields(limits)


def test_cpu_node_limit_contradicts_cpu_preferred_chain():
    check_limits(Limits(max_cpu_nodes=0, max_copies=0, max_copy_bytes_per_token=0), (GPU, CPU))
    check_limits(Limits(max_copies=0, max_copy_bytes_per_token=0), (CPU,))
    with pytest.raises(UsageError, match="contradicts `providers`"):
        check_limits(Limits(max_cpu_nodes=5), (CPU,))


def test_exceeded_limit_appears_in_report_verdict_and_text():
    report = report_of(mixed_facts(), GPU_CHAIN, judge=lambda made: exceeded_limits(made, Limits(max_cpu_nodes=0)))
    assert len(report.exceeded_limits) == 1
    assert "limit exceeded: --max-cpu-nodes 0: 4 nodes" in shown(report)
