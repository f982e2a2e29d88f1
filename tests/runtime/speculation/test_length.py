"""The number of draft tokens follows from measured step times and acceptance."""

from __future__ import annotations

import random

import pytest

from partita.runtime.engine.drafting import Verified
from partita.runtime.speculation.length import EMPTY_STEPS, OFF_STEPS, DraftLength


def simulate(rate: float, slope: float, steps: int, seed: int = 0) -> tuple[float, list[int]]:
    """Speedup over decoding without drafts, and the draft tokens of each step. `slope`: cost of a draft token, in
    steps without any."""
    control, draws, counts, tokens, seconds = DraftLength(), random.Random(seed), [], 0, 0.0
    for _ in range(steps):
        count = control.count(1)
        accepted = 0
        while accepted < count and draws.random() < rate:
            accepted += 1
        took = 0.001 * (1 + slope * count) * draws.uniform(0.97, 1.03)
        control.record(1, count, took, [Verified(count, accepted)] if count else [])
        counts.append(count)
        tokens, seconds = tokens + 1 + accepted, seconds + took
    return tokens * 0.001 / seconds, counts


@pytest.mark.parametrize(
    ("rate", "slope", "least"), [(0.95, 0.05, 3.0), (0.9, 0.2, 1.5), (0.6, 0.05, 1.6)], ids=["copy", "fp32", "GPU"]
)
def test_accepted_draft_tokens_make_decode_faster(rate: float, slope: float, least: float) -> None:
    assert simulate(rate, slope, 600)[0] > least


@pytest.mark.parametrize(("rate", "slope"), [(0.0, 0.05), (0.0, 0.4), (0.2, 0.4), (0.5, 0.6)])
def test_rejected_draft_tokens_cost_at_most_four_percent(rate: float, slope: float) -> None:
    speedup, counts = simulate(rate, slope, 2000)
    assert speedup > 0.96
    assert slope < 0.3 or sum(map(bool, counts)) < 2000 / 10


def test_cheap_draft_tokens_are_many_and_dear_ones_few() -> None:
    assert max(simulate(0.95, 0.05, 100)[1]) == 8
    counts = simulate(0.7, 0.25, 300)[1]
    assert counts.count(8) < counts.count(2)


def test_drafting_is_off_for_a_while_after_it_lost_and_is_tried_again() -> None:
    counts = simulate(0.0, 0.4, 200)[1]
    tries = [step for step, count in enumerate(counts) if count]
    gaps = [later - earlier for earlier, later in zip(tries, tries[1:], strict=False)]
    assert {gap for gap in gaps if gap > 3} == {OFF_STEPS + 1} or min(gap for gap in gaps if gap > 3) > OFF_STEPS


def test_drafting_rests_after_drafters_proposed_nothing() -> None:
    control = DraftLength()
    for _ in range(3):
        control.count(1)
        control.record(1, 0, 0.001, [])
    counts = []
    for _ in range(20):
        counts.append(control.count(1))
        control.record(1, 0, 0.001, [])
    tried = [step for step, count in enumerate(counts) if count]
    assert tried[1] - tried[0] == EMPTY_STEPS + 1, "once in nine steps"


def test_rows_have_times_of_their_own() -> None:
    control = DraftLength()
    for _ in range(2):
        assert control.count(1) == 0
        control.record(1, 0, 0.001, [])
    assert control.count(1) == 2 and control.count(4) == 0, "no step of four rows was measured"
