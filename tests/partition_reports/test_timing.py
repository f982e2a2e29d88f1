"""Percentiles, steps included in the speed, steps needed to show a percentile, and speculative decoding."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from partita.observations.facts import SpeculationFact, StepFact
from partita.partition_reports.cost import percentile, speculation_figures, step_times
from partita.partition_reports.phase_records import Phase
from partita.partition_reports.sections.model import Table
from tests.partition_reports.report_changes import mixed
from tests.partition_reports.samples import phase_of, section_of, step


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 101])
def test_percentile_matches_numpy(count):
    draws = random.Random(count)
    values = [draws.random() for _ in range(count)]
    for percent in (1, 50, 95, 99):
        expected = pytest.approx(float(np.percentile(values, percent))) if values else None
        assert percentile(values, percent) == expected


def test_profiled_steps_are_excluded_from_speed():
    steps = [step("decode", 1, 9.0, observed=True), step("decode", 1, 0.09, 0.01), step("decode", 1, 0.19, 0.01)]
    times = step_times([*steps, step("prefill", 7)], "decode", rows=1)
    assert (times.steps, times.tokens) == (2, 2)
    assert times.seconds == pytest.approx(0.3)
    assert times.tokens_per_second == pytest.approx(2 / 0.3)
    assert times.step_p50_ms == pytest.approx(150)
    assert times.overhead_p50_ms == pytest.approx(10)
    assert "2 of 3 steps" in times.timing_note


def test_profiled_steps_count_if_all_steps_are_profiled():
    times = step_times([step("prefill", 5, observed=True), step("prefill", 3, observed=True)], "prefill", rows=2)
    assert (times.steps, times.tokens) == (2, 16)
    assert times.timing_note == "speed over 2 steps, all slowed by profiling"


def phase(steps: int) -> Phase:
    return phase_of(mixed(), "decode").model_copy(
        update={"steps": steps, "step_p50_ms": 1.0, "step_p95_ms": 2.0, "step_p99_ms": 3.0}
    )


@pytest.mark.parametrize(
    ("steps", "shown"), [((3,), set()), ((20,), {"step p95 ms"}), ((1, 100), {"step p95 ms", "step p99 ms"})]
)
def test_percentiles_are_shown_only_with_enough_steps(steps: tuple[int, ...], shown: set[str]):
    found = section_of(mixed().model_copy(update={"phases": tuple(map(phase, steps))}), "phases")
    figures = found and found.blocks[0]
    assert isinstance(figures, Table)
    rows = {row[0]: row[1:] for row in figures.rows}
    assert {name for name in rows if "p9" in name} == shown
    assert all(rows[name][0] == "-" for name in shown if steps[0] == 1), "one step has no slow ones"


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
