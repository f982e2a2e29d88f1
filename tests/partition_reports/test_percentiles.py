"""Percentiles of slow steps are shown where there are steps enough for one to be beyond them."""

from __future__ import annotations

import pytest

from partita.partition_reports.records import Phase
from partita.partition_reports.sections.phases import speed_figures
from tests.partition_reports.report_changes import mixed
from tests.partition_reports.samples import phase_of


def phase(steps: int) -> Phase:
    return phase_of(mixed(), "decode").model_copy(
        update={"steps": steps, "step_p50_ms": 1.0, "step_p95_ms": 2.0, "step_p99_ms": 3.0}
    )


@pytest.mark.parametrize(
    ("steps", "shown"), [((3,), set()), ((20,), {"step p95, ms"}), ((1, 100), {"step p95, ms", "step p99, ms"})]
)
def test_a_percentile_needs_steps(steps: tuple[int, ...], shown: set[str]):
    rows = {name: values for name, *values in speed_figures([phase(count) for count in steps])}
    assert {name for name in rows if "p9" in name} == shown
    assert all(rows[name][0] == "-" for name in shown if steps[0] == 1), "one step has no slow ones"
