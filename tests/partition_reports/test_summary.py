"""Stored summary of a report: verdict, counts and stable node names, for comparing many reports."""

from __future__ import annotations

import gzip
from dataclasses import replace

import pytest

from partita.check.gate import find
from partita.check.requirements import parse_requirement
from partita.compare.reports import compare
from partita.partition_reports import storage
from partita.partition_reports.outcome import headline, state_name, summarise
from partita.partition_reports.sections.overview import sign_and_tone
from tests.partition_reports.report_changes import each_phase, mixed
from tests.partition_reports.reports import RECORDED, recorded
from tests.partition_reports.samples import CPU, GPU, recorded_facts, report_of, shown, top, with_session


def test_summary_stores_verdict_and_counts():
    report = mixed()
    assert report.summary is not None
    assert (report.summary.preferred_provider, report.summary.state) == (GPU, state_name(report))
    assert report.summary.verdict == headline(report)
    (decode,) = (entry for entry in report.summary.phases if entry.phase == "decode")
    (phase,) = (entry for entry in report.phases if entry.name == "decode")
    assert decode.nodes == len(phase.file_nodes) == sum(decode.nodes_by_provider.values()) == 9
    assert decode.nodes_by_provider[CPU] == decode.fallback_nodes == 3
    assert (decode.share, decode.added_nodes, decode.folded_nodes) == (6 / 9, 4, 0), "three copies and a Transpose"
    assert sum(decode.reasons.values()) == decode.fallback_nodes and decode.reasons["runtime_inserted"] == 0
    assert decode.copies == len(phase.copies) and decode.tokens_per_second == phase.tokens_per_second
    assert report.summary.cache_in_place is None, "it has no states"
    assert report.summary.checks_failed == sum(not check.passed for check in report.checks)


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".json.gz") for path in RECORDED.glob("*.json.gz")))
def test_recorded_reports_are_readable(name, tmp_path):
    path = tmp_path / "recorded.json"
    path.write_bytes(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))
    assert storage.read(path).phases[-1].nodes == recorded(name).phases[-1].nodes
    assert compare(recorded(name), recorded(name)).same


def test_headline_counts_fallbacks_of_a_single_phase():
    report = mixed()
    there = {
        phase.name: tuple(
            node for node in phase.nodes if node.provider == GPU and not (node.op_type or "").startswith("Memcpy")
        )
        for phase in report.phases
    }
    clean = each_phase(report, lambda phase: {"nodes": there["decode"]} if phase.name == "decode" else {})
    assert "0 %" not in headline(clean) and "fallback nodes" in headline(clean)


def test_every_view_headline_reports_failed_run():
    report = report_of(replace(recorded_facts(), failure="Non-zero status\nin node x"))
    said = "Placed on CPU; its run failed: Non-zero status in node x"
    assert (headline(report), sign_and_tone(report)[1], summarise(report).state) == (said, "bad", "failed")
    assert summarise(report).verdict == said
    for view in ("brief", "text", "markdown", "html"):
        assert said in " ".join(shown(report, view).split()) and "✓" not in shown(report, view)


def test_headline_of_opened_model_uses_would_run():
    facts = recorded_facts()
    opened = replace(with_session(facts, events=(), runs=()), steps=(), finish_reason=None)
    assert headline(report_of(opened)) == "All nodes would run on CPU"


def test_shares_are_fractions_of_file_nodes():
    report = mixed()
    holds, said = find(parse_requirement("provider=webgpu,share>=0.66", lambda _: GPU), report)
    assert holds and said.startswith("share 0.6667 ")
    placed = "6 of 9 nodes on WebGpu, 3 on CPU (and 4 added by ONNX Runtime)"
    assert top(report)["placement"] == f"{placed} in prefill and decode"
