"""Chain of three providers, preferred provider unavailable: reported once, per-node reasons remain."""

from __future__ import annotations

from partita.partition_reports.outcome import fallbacks_of, headline, summarise
from partita.partition_reports.sections.fallbacks import section
from partita.partition_reports.sections.model import Group
from partita.partition_reports.sections.overview import opening, sign_and_tone
from tests.partition_reports.report_changes import mixed
from tests.partition_reports.samples import (
    CPU,
    CPU_CHAIN,
    MISSING_FIRST_CHAIN,
    REQUEST,
    TENSORRT,
    recorded_facts,
    report_of,
    shown,
    top,
)

REPORT = mixed(MISSING_FIRST_CHAIN)
OWN = {"no_kernel_op", "cpu_preferred", "unexplained", "runtime_inserted"}


def test_summary_counts_deciding_reason_of_each_fallback() -> None:
    assert {entry.reason for entry in REPORT.fallbacks} == {"library_missing"}
    reasons = summarise(REPORT).phases[0].reasons
    assert reasons["library_missing"] == 6, "three added nodes apart"
    assert set(reasons) == {"library_missing", *OWN}
    on_cpu = [entry for entry in fallbacks_of(REPORT) if entry.provider == CPU]
    assert all(entry.skipped == () and entry.remedy != "install TensorRT" for entry in on_cpu)


def test_fallback_section_reports_unavailable_provider_once() -> None:
    titles = [block.title for block in section(REPORT).blocks if isinstance(block, Group)]
    assert sum("is unavailable: library_missing" in title for title in titles) == 1
    assert any("No kernel" in title and title.endswith("on CPU") for title in titles)
    assert "not on Tensorrt either" not in str(section(REPORT))


def test_top_lists_unavailable_provider_then_other_fallbacks() -> None:
    text = top(REPORT)["fallbacks"]
    assert text.startswith("Tensorrt is unavailable: library_missing: ") and "; 1 node on CPU: " in text
    remedies = [str(block) for block in opening(REPORT) if "remedy" in str(block)]
    assert "install TensorRT" in remedies[0] and len(remedies) > 1


DEFAULT = report_of(
    recorded_facts(),
    (MISSING_FIRST_CHAIN[0], *CPU_CHAIN),
    request=REQUEST.model_copy(update={"chain": (CPU,), "chain_source": "default: tensorrt: library_missing; so cpu"}),
)
"""A run that named no chain, and whose best installed provider could not start."""


def test_default_chain_without_first_provider_shows_warning() -> None:
    said = "Ran on CPU; Tensorrt is installed but could not start: library_missing"
    assert (headline(DEFAULT), sign_and_tone(DEFAULT)) == (said, ("◐", "warn"))
    assert "library_missing" in top(DEFAULT)["fallbacks"] and "install TensorRT" in top(DEFAULT)["remedy"]
    assert said in shown(DEFAULT, "html") and "✓" not in shown(DEFAULT, "markdown")
    summary = summarise(DEFAULT)
    assert (summary.preferred_provider, summary.state) == (TENSORRT, "none")
    assert summary.verdict == said
