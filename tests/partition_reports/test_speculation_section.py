"""Speculative decoding statistics, from recorded steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.observations.facts import SpeculationFact, StepFact
from partita.partition_reports.cost import speculation_figures
from partita.partition_reports.sections.model import Table
from partita.partition_reports.sections.phases import speculation_section as section
from tests.partition_reports.samples import recorded_facts, report_of

PLAIN = StepFact("decode", 1, 0.0018, 0.0003, False, 1, draft_seconds=0.0001)
WIDE = StepFact("decode", 3, 0.0022, 0.0003, False, 3, drafted=3, accepted=2, draft_seconds=0.0001)
REJECTED = replace(WIDE, tokens=1, row_tokens=1, accepted=0)
PROFILED = replace(PLAIN, observed=True, seconds=1.0)
PREFILL = StepFact("prefill", 20, 0.05, 0.001, False, 20)
STEPS = (PREFILL, PROFILED, PLAIN, PLAIN, PLAIN, WIDE, WIDE, WIDE, REJECTED)
NGRAM = SpeculationFact("ngram")


def test_speedup_is_relative_to_steps_without_draft_tokens() -> None:
    found = speculation_figures(NGRAM, STEPS)
    assert found is not None
    assert (found.steps, found.drafting_steps, found.tokens) == (7, 4, 13)
    assert (found.drafted, found.accepted, found.acceptance_rate) == (12, 6, 0.5)
    assert found.plain_token_ms == pytest.approx(2.0), "drafting excluded"
    seconds = 3 * 0.0021 + 4 * 0.0025
    assert found.seconds == pytest.approx(seconds) and found.speedup == pytest.approx(13 * 0.002 / seconds)


def test_batched_steps_are_compared_at_same_row_count() -> None:
    """Rows of a batch share the time of a step."""
    pair = StepFact("decode", 1, 0.0036, 0.0004, False, 4)
    found = speculation_figures(NGRAM, (pair, pair, *STEPS))
    assert found is not None
    plain, took = 13 * 0.002 + 2 * 0.004, 3 * 0.0021 + 4 * 0.0025 + 2 * 0.004
    assert found.speedup == pytest.approx(plain / took)


def test_speedup_is_none_without_plain_steps() -> None:
    found = speculation_figures(NGRAM, (PREFILL, WIDE))
    assert found is not None and found.speedup is None and found.plain_token_ms is None
    none = speculation_figures(NGRAM, (PREFILL,))
    assert none is not None and (none.steps, none.tokens_per_step, none.acceptance_rate) == (0, None, None)
    assert speculation_figures(None, STEPS) is None


def test_section_shows_acceptance_rate_and_speedup() -> None:
    report = report_of(replace(recorded_facts(), steps=STEPS, speculation=SpeculationFact("draft", "small")))
    found = section(report)
    assert found is not None
    (figures,) = found.blocks
    assert isinstance(figures, Table)
    shown = {row.cells[0]: row.cells[1] for row in figures.rows}
    assert {"draft": "small", "drafted": "12", "accepted": "6", "acceptance rate": "50.0 %"}.items() <= shown.items()
    assert {"tokens per step": "1.86", "plain token ms": "2.00", "speedup": "1.595"}.items() <= shown.items()
    assert section(report_of(recorded_facts())) is None
