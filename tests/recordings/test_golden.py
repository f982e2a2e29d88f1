"""Reports of recorded facts of real runs, in every environment, are the golden ones."""

from __future__ import annotations

import pytest

from tests.recordings.runs import GOLDEN, NAMES, golden, report


@pytest.mark.parametrize("name", NAMES)
def test_the_report_of_recorded_facts_is_the_golden_one(name: str) -> None:
    made = report(name)
    assert [check.name for check in made.checks if not check.passed] == []
    assert golden(made) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8"), "see tests/recordings/runs.py"


def test_every_golden_report_has_its_run() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(NAMES)
