"""KV cache state (in place, copied, not checked) in the summary, checks, texts and sections."""

from __future__ import annotations

from typing import Any

import pytest

from partita.check.gate import check
from partita.options.reports import CheckOptions
from partita.partition_reports.outcome import cache_text, is_in_place, status_of, summarise
from partita.partition_reports.sections.phases import cache_section
from tests.partition_reports.samples import recorded_facts, report_of

REPORT = report_of(recorded_facts())
CHANGES: dict[str, tuple[dict[str, Any], bool | None, str]] = {
    "in_place": ({}, True, "in place"),
    "not_checked": ({"checked_steps": 0}, None, "not checked"),
    "copied": ({"in_place_states": 0}, False, "NOT in place"),
    "moved": ({"address_changes": 2}, False, "NOT in place"),
    "no_cache": ({"states": 0, "in_place_states": 0, "entries": ()}, None, ""),
}


@pytest.mark.parametrize("status", CHANGES)
def test_cache_state_agrees_in_summary_check_and_sections(status: str) -> None:
    update, answer, word = CHANGES[status]
    assert REPORT.cache is not None
    cache = REPORT.cache.model_copy(update=update)
    report = REPORT.model_copy(update={"cache": cache})
    assert status_of(cache) == status
    assert is_in_place(cache) is answer and summarise(report).cache_in_place is answer
    outcome = check(report, CheckOptions(cache_in_place=True), "r").outcomes[-1]
    assert outcome.met is (answer is True)
    assert status == "no_cache" or word in cache_text(cache)
    assert (cache_section(report) is None) == (status == "no_cache")
