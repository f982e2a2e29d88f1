"""What guesses have come to: figures from the steps alone, and a section that says them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.observations.facts import SpeculationFact, StepFact
from partita.partition_reports.sections.model import Line, Table
from partita.partition_reports.sections.speculation import section
from partita.partition_reports.speculation import speculation_figures
from tests.partition_reports.samples import recorded_facts, report_of

PLAIN = StepFact("decode", 1, 0.0018, 0.0003, False, 1, width=1, guess_seconds=0.0001)
WIDE = StepFact("decode", 3, 0.0022, 0.0003, False, 3, width=4, guessed=3, confirmed=2, guess_seconds=0.0001)
WRONG = replace(WIDE, tokens=1, row_tokens=1, confirmed=0)
DECLINED = replace(PLAIN, declined=True)
PROFILED = replace(PLAIN, observed=True, seconds=1.0)
PREFILL = StepFact("prefill", 20, 0.05, 0.001, False, 20, width=20)
STEPS = (PREFILL, PROFILED, PLAIN, PLAIN, DECLINED, WIDE, WIDE, WIDE, WRONG)
NGRAM = SpeculationFact("ngram")


def test_the_gain_is_by_what_a_token_took_without_guesses_in_the_same_run() -> None:
    found = speculation_figures(NGRAM, STEPS)
    assert found is not None
    assert (found.steps, found.guessing_steps, found.declined_steps, found.tokens) == (7, 4, 1, 13)
    assert (found.guessed, found.confirmed, found.acceptance) == (12, 6, 0.5)
    assert found.plain_token_ms == pytest.approx(2.0), "less the time in which guesses were looked for"
    seconds = 3 * 0.0021 + 4 * 0.0025
    assert found.seconds == pytest.approx(seconds) and found.gain == pytest.approx(13 * 0.002 / seconds)
    assert [(entry.width, entry.steps, entry.tokens) for entry in found.widths] == [(1, 3, 3), (4, 4, 10)]


def test_a_step_after_a_look_that_found_nothing_is_none_without_guesses() -> None:
    """It is longer for the look, so guesses would look better beside it than they are."""
    looked = replace(PLAIN, seconds=0.0023, looked=True)
    found = speculation_figures(NGRAM, (*STEPS, looked, looked, looked, looked))
    assert found is not None and found.plain_token_ms == pytest.approx(2.0)
    took = 3 * 0.0021 + 4 * 0.0025 + 4 * 0.0026
    assert found.gain == pytest.approx(17 * 0.002 / took)
    alone = speculation_figures(NGRAM, (WIDE, looked))
    assert alone is not None and alone.plain_token_ms == pytest.approx(2.5), "where there is nothing else"


def test_steps_of_several_rows_are_compared_with_those_of_as_many() -> None:
    """Rows beside each other share the time of a step: a token of theirs says nothing of what one alone takes."""
    beside = StepFact("decode", 1, 0.0036, 0.0004, False, 4, width=1)
    found = speculation_figures(NGRAM, (beside, beside, *STEPS))
    assert found is not None
    plain, took = 13 * 0.002 + 2 * 0.004, 3 * 0.0021 + 4 * 0.0025 + 2 * 0.004
    assert found.gain == pytest.approx(plain / took)


def test_without_a_step_to_compare_with_there_is_no_gain_and_nobody_makes_one_up() -> None:
    found = speculation_figures(NGRAM, (PREFILL, WIDE))
    assert found is not None and found.gain is None and found.plain_token_ms is None
    none = speculation_figures(NGRAM, (PREFILL,))
    assert none is not None and (none.steps, none.tokens_per_step, none.acceptance) == (0, None, None)
    assert speculation_figures(None, STEPS) is None


def test_a_section_says_it() -> None:
    report = report_of(replace(recorded_facts(), steps=STEPS, speculation=SpeculationFact("draft", "small")))
    found = section(report)
    assert found is not None
    told = " ".join(str(block.text) for block in found.blocks if isinstance(block, Line))
    assert "1.60 times as fast as without guesses" in told and "2.00 ms" in told
    assert "the draft small: 6 of 12 were right (50.0 %), in 4 of 7 steps; 1.86 tokens per step" in told
    assert "In 1 step guesses were not worth it" in told
    (table,) = [block for block in found.blocks if isinstance(block, Table)]
    assert [row.cells[0] for row in table.rows] == ["1", "4"] and table.rows[1].cells[-1] == "1.20"
    assert section(report_of(recorded_facts())) is None
