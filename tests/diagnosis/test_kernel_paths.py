"""Kernel paths from synthetic facts: sources of kernel names, and limits with unknown kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.check.gate import exceeded_limits
from partita.check.requirements import Limits
from partita.explain import find
from partita.observations.facts import AS_IS, NodeProbe, ProbeRun
from partita.observations.patterns import PRESENT, KernelRow
from partita.partition_reports.render.show import load_view
from partita.providers.resolve import known_providers
from partita.remedies import Remedy
from partita.runtime.ort.native_log import parse_profile
from tests.partition_reports.samples import GPU, GPU_CHAIN, mixed_facts, report_of

FIRST, LAST = "model.layers.0.self_attn.q_proj/MatMul", "lm_head/MatMul"
ROW = KernelRow(("MatMul",), "plain", "a test")
SLOW = replace(ROW, path="slow", cause="it has to", remedy=Remedy("do not"))
RUN_LOG = {"prefill": (), "decode": (f"Kernel Node={FIRST} fused", "[I:onnxruntime:, a.cc:1 Run] unpacked")}


def of(*rows, run_log=RUN_LOG, **changes):
    """Paths of the two products in prefill and decode."""
    facts = mixed_facts()
    session = facts.sessions[0].with_provider(GPU, kernels=rows)
    return report_of(replace(facts, sessions=(replace(session, run_log=run_log, **changes),)), GPU_CHAIN)


def test_explanation_shows_no_kernel_times_beside_those_of_each_phase():
    found = find(of(SLOW), LAST)
    assert found is not None
    said = " ".join(load_view("text", "partita.explain").to_text(found).split())
    assert said.count("7.7 %") == 2, "the row of each phase"
    assert "evidence kind derived evidence always (a test) cause it has to remedy do not" in said


def paths(report):
    return {(entry.phase, entry.node): (entry.path, entry.evidence_kind) for entry in report.kernel_paths}


def test_log_line_applies_only_to_its_node_and_phase():
    found = paths(of(replace(ROW, log=r"Node=(?P<node>\S+) fused")))
    assert found == {
        ("prefill", FIRST): ("unknown", "none"),
        ("prefill", LAST): ("unknown", "none"),
        ("decode", FIRST): ("plain", "logged"),
        ("decode", LAST): ("unknown", "none"),
    }


def test_log_pattern_without_node_must_match_a_captured_log():
    row = replace(SLOW, log="unpacked")
    found = paths(of(row, ROW))
    assert found["decode", LAST] == ("slow", "logged") and found["prefill", LAST] == ("plain", "derived")
    assert paths(of(row, ROW, run_log={}))["decode", LAST] == ("slow", "derived")


def test_first_matching_row_decides():
    report = of(replace(SLOW, when={"bits": (PRESENT,)}), replace(ROW, when={"prefix": ("lm",)}))
    assert paths(report)["decode", LAST] == ("plain", "derived")
    assert paths(report)["decode", FIRST] == ("unknown", "none")


def test_unknown_kernels_count_as_possibly_slow():
    report = of(replace(SLOW, when={"prefix": ("lm",)}))
    assert exceeded_limits(report, Limits(max_slow_nodes=2)) == ()
    (unknown,) = exceeded_limits(report, Limits(max_slow_nodes=1))
    assert "cannot be confirmed in prefill and decode: the kernel is unknown for " in unknown and FIRST in unknown
    (known,) = exceeded_limits(report, Limits(max_slow_nodes=0))
    assert known == f"--max-slow-nodes 0: 1 node on a slow kernel path in prefill and decode: {LAST} (MatMul: slow)"
    assert exceeded_limits(of(), Limits(max_slow_nodes=0)) == ()


@pytest.mark.parametrize(
    ("seconds", "kind", "text"),
    [
        ((4e-3, 1e-3), "probed", "time of one-node sessions: 4.00 ms unchanged, 1.00 ms with bits=8"),
        ((1e-3, 1e-3), "derived", "the change is not faster: 1.00 ms unchanged, 1.00 ms with bits=8"),
        ((4e-3, None), "derived", "always (a test)"),
    ],
)
def test_single_node_session_times_are_evidence_if_change_is_faster(seconds, kind, text):
    session = mixed_facts().sessions[0].with_provider(GPU, kernels=(SLOW,))
    runs = [
        ProbeRun("attribute" if change else AS_IS, change, "supported", "", seconds=each)
        for change, each in zip(("", "with bits=8"), seconds, strict=True)
    ]
    session = session.with_provider(GPU, probes={LAST: NodeProbe(LAST, tuple(runs))})
    report = report_of(replace(mixed_facts(), sessions=(session,)), GPU_CHAIN)
    found = {entry.node: entry for entry in report.kernel_paths}
    assert found[LAST].evidence_kind == kind and found[LAST].evidence.endswith(text) and found[LAST].is_slow
    assert found[FIRST].evidence == "always (a test)"


@pytest.mark.parametrize("kernel", ["XQA", "FLASH_ATTENTION", "MATH"])
def test_cuda_attention_log_lines_name_kernel(kernel):
    """Lines from H100 dry runs; XQA appears in decode steps of an fp16 package."""
    line = f"Operator=GroupQueryAttention Node={FIRST} DataType=fp16 SdpaKernel={kernel} EffectiveKvLengthBound=17"
    rows = tuple(replace(row, operators=("MatMul",)) for row in known_providers()["cuda"].kernels)
    path, kind = paths(of(*rows, run_log={"decode": (line,)}))["decode", FIRST]
    assert (path, kind) == ({"XQA": "XQA", "FLASH_ATTENTION": "flash", "MATH": "unfused"}[kernel], "logged")


def entry(name, ts, cat="Node", dur=1):
    return f'{{"cat": "{cat}", "name": "{name}", "ts": {ts}, "dur": {dur}, "args": {{"op_name": "MatMul"}}}}'


def test_device_programs_are_assigned_in_execution_order():
    events = [
        entry("model_run", 0, "Session", 10),
        entry("a_kernel_time", 1),
        entry("b_kernel_time", 2),
        entry("model_run", 20, "Session", 10),
        entry("a_kernel_time", 21),
    ]
    programs = ["a&MatMul&First", "a&MatMul&Second", "b&MatMul&Third", "a&MatMul&Fourth"]
    text = ",".join((*events, *(entry(name, 0, "Api") for name in programs)))
    found, _ = parse_profile(f"[{text}]", [("prefill", 1), ("decode", 1)])
    assert [each.programs for each in found] == [("First", "Second"), ("Third",), ("Fourth",)]
    text = ",".join((*events, entry("lost&MatMul&First", 0, "Api")))
    found, _ = parse_profile(f"[{text}]", [("prefill", 1), ("decode", 1)])
    assert {each.programs for each in found} == {()}, "lists that do not match name no program"
