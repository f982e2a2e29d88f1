"""Outcome of a report in summary, headline, top and gate: failures, unavailable providers, cache, shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from partita.check.gate import check
from partita.options.reports import CheckOptions
from partita.partition_reports.outcome import cache_text, headline, state_name, summarise
from partita.partition_reports.sections.model import Group
from partita.partition_reports.sections.report import opening, sign_and_tone
from tests.partition_reports.report_changes import each_phase, mixed
from tests.partition_reports.reports import empty_report
from tests.partition_reports.samples import (
    CPU,
    CPU_CHAIN,
    GPU,
    MISSING_FIRST_CHAIN,
    REQUEST,
    TENSORRT,
    phase_of,
    recorded_facts,
    report_of,
    section_of,
    shown,
    top,
    with_session,
)


def test_summary_stores_verdict_and_counts():
    report = mixed()
    assert report.summary is not None
    assert (report.summary.preferred_provider, report.summary.state) == (GPU, state_name(report))
    assert report.summary.verdict == headline(report)
    (decode,) = (entry for entry in report.summary.phases if entry.phase == "decode")
    phase = phase_of(report, "decode")
    assert decode.nodes == len(phase.file_nodes) == sum(decode.nodes_by_provider.values()) == 9
    assert decode.nodes_by_provider[CPU] == decode.fallback_nodes == 3
    assert (decode.share, decode.added_nodes, decode.folded_nodes) == (6 / 9, 4, 0), "three copies and a Transpose"
    assert sum(decode.reasons.values()) == decode.fallback_nodes and decode.reasons["runtime_inserted"] == 0
    assert decode.copies == len(phase.copies) and decode.tokens_per_second == phase.tokens_per_second
    assert report.summary.cache_in_place is None, "it has no states"
    assert report.summary.checks_failed == sum(not check.passed for check in report.checks)


def test_every_view_headline_reports_failed_run():
    report = report_of(replace(recorded_facts(), failure="Non-zero status\nin node x"))
    said = "Placed on CPU; its run failed: Non-zero status in node x"
    assert (headline(report), sign_and_tone(report)[1], summarise(report).state) == (said, "bad", "failed")
    assert summarise(report).verdict == said
    for view in ("brief", "text", "markdown", "html"):
        assert said in " ".join(shown(report, view).split()) and "✓" not in shown(report, view)


def test_node_whose_parts_run_on_two_providers_is_not_nothing():
    """A call of a function counts as on the CPU with one of its nodes there; another is on the preferred provider."""

    def on_cpu(phase):
        return {"file_nodes": tuple(row.model_copy(update={"provider": CPU}) for row in phase.file_nodes)}

    assert headline(each_phase(mixed(), on_cpu)) == "31 % of decode's node time is in 4 nodes on CPU"


def test_report_without_known_nodes_says_so():
    assert (state_name(empty_report()), headline(empty_report())) == ("nothing", "No executed nodes are known")


def test_headline_of_opened_model_uses_would_run():
    opened = replace(with_session(recorded_facts(), events=(), runs=()), steps=(), finish_reason=None)
    assert headline(report_of(opened)) == "All nodes would run on CPU"


# Chain of three providers without the preferred one: reported once, reasons of nodes remain.


def test_unavailable_provider_is_reported_once_and_reasons_of_nodes_remain() -> None:
    report = mixed(MISSING_FIRST_CHAIN)
    assert {entry.reason for entry in report.fallbacks} == {"library_missing"}
    reasons = summarise(report).phases[0].reasons
    assert reasons["library_missing"] == 6, "three added nodes apart"
    assert set(reasons) == {"library_missing", "no_kernel_op", "cpu_preferred", "unexplained", "runtime_inserted"}
    on_cpu = [entry for entry in report.active_fallbacks if entry.provider == CPU]
    assert all(entry.skipped == () and entry.remedy != "install TensorRT" for entry in on_cpu)
    found = section_of(report, "fallbacks")
    assert found is not None
    titles = [block.title for block in found.blocks if isinstance(block, Group)]
    assert sum("is unavailable: library_missing" in title for title in titles) == 1
    assert any("No kernel" in title and title.endswith("on CPU") for title in titles)
    assert "not on Tensorrt either" not in str(found)
    text = top(report)["fallbacks"]
    assert text.startswith("Tensorrt is unavailable: library_missing: ") and "; 1 node on CPU: " in text
    remedies = [str(block) for block in opening(report) if "remedy" in str(block)]
    assert "install TensorRT" in remedies[0] and len(remedies) > 1


def test_default_chain_without_first_provider_shows_warning() -> None:
    """A run that named no chain, and whose best installed provider could not start."""
    request = REQUEST.model_copy(update={"chain": (CPU,), "chain_source": "default: tensorrt: library_missing; so cpu"})
    report = report_of(recorded_facts(), (MISSING_FIRST_CHAIN[0], *CPU_CHAIN), request=request)
    said = "Ran on CPU; Tensorrt is installed but could not start: library_missing"
    assert (headline(report), sign_and_tone(report)) == (said, ("◐", "warn"))
    assert "library_missing" in top(report)["fallbacks"] and "install TensorRT" in top(report)["remedy"]
    assert said in shown(report, "html") and "✓" not in shown(report, "markdown")
    summary = summarise(report)
    assert (summary.preferred_provider, summary.state, summary.verdict) == (TENSORRT, "none", said)


CACHES: dict[str, tuple[dict[str, Any], bool | None, str]] = {
    "in_place": ({}, True, "in place"),
    "not_checked": ({"checked_steps": 0}, None, "not checked"),
    "copied": ({"in_place_states": 0}, False, "NOT in place"),
    "moved": ({"address_changes": 2}, False, "NOT in place"),
    "no_cache": ({"states": 0, "in_place_states": 0, "entries": ()}, None, ""),
}


@pytest.mark.parametrize("status", CACHES)
def test_cache_state_agrees_in_summary_check_and_sections(status: str) -> None:
    (update, answer, word), report = CACHES[status], report_of(recorded_facts())
    assert report.cache is not None
    cache = report.cache.model_copy(update=update)
    report = report.model_copy(update={"cache": cache})
    assert cache.status == status
    assert report.cache_in_place is answer and summarise(report).cache_in_place is answer
    outcome = check(report, CheckOptions(cache_in_place=True), "r").outcomes[-1]
    assert outcome.met is (answer is True)
    assert status == "no_cache" or word in cache_text(cache)
    assert (section_of(report, "cache") is None) == (status == "no_cache")
