"""Percentiles, steps included in the speed, and the step count needed to show a percentile."""

from __future__ import annotations

import random

import numpy as np
import pytest

from partita.partition_reports.cost import percentile, step_times
from partita.partition_reports.records import Phase
from partita.partition_reports.sections.model import Table
from partita.partition_reports.sections.phases import section
from tests.partition_reports.report_changes import mixed
from tests.partition_reports.samples import phase_of, step


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 101])
def test_percentile_matches_numpy(count):
    values = [random.Random(count).random() for _ in range(count)]
    for percent in (0, 50, 95, 99, 100):
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
    assert "2 of 3 steps" in times.note


def test_profiled_steps_count_if_all_steps_are_profiled():
    times = step_times([step("prefill", 5, observed=True), step("prefill", 3, observed=True)], "prefill", rows=2)
    assert (times.steps, times.tokens) == (2, 16)
    assert times.note == "speed over 2 steps, all slowed by profiling"


def phase(steps: int) -> Phase:
    return phase_of(mixed(), "decode").model_copy(
        update={"steps": steps, "step_p50_ms": 1.0, "step_p95_ms": 2.0, "step_p99_ms": 3.0}
    )


@pytest.mark.parametrize(
    ("steps", "shown"), [((3,), set()), ((20,), {"step p95 ms"}), ((1, 100), {"step p95 ms", "step p99 ms"})]
)
def test_percentiles_are_shown_only_with_enough_steps(steps: tuple[int, ...], shown: set[str]):
    figures, *_ = section(mixed().model_copy(update={"phases": tuple(map(phase, steps))})).blocks
    assert isinstance(figures, Table)
    rows = {row.cells[0]: row.cells[1:] for row in figures.rows}
    assert {name for name in rows if "p9" in name} == shown
    assert all(rows[name][0] == "-" for name in shown if steps[0] == 1), "one step has no slow ones"
