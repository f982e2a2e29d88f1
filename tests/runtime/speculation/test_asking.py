"""When a draft is asked, and when it sleeps: in a time that is computed, so that every run is the same."""

from __future__ import annotations

import numpy as np
import pytest

from partita.runtime.engine.guesses import Heard, Judged
from partita.runtime.speculation.asking import Asking
from partita.runtime.speculation.governor import Governor

STEP = 0.002
PRIOR = (0.6,)


class Draft:
    """Has steps of `step` steps of its package, reads a token in `token` of them, and is right with a chance."""

    def __init__(self, step: float, chance: float, token: float = 0.0, slope: float = 0.1) -> None:
        self.step, self.chance, self.slope = step, chance, slope
        self.token = token or step / 20
        self.read = 0
        """Tokens of the row that it has read."""
        self.asked = 0

    def governor(self) -> Governor:
        return Governor(PRIOR, asking=Asking(self.step * STEP, self.token * STEP))

    def generated(self, governor: Governor, prompt: int = 60, tokens: int = 150, seed: int = 1) -> float:
        """Speed of a generation by that without a draft."""
        random, seconds, known = np.random.default_rng(seed), 0.0, prompt
        end, self.read = prompt + tokens, 0
        governor.begin()
        while known < end:
            most, took, behind, rests = 0, 0.0, known - 1 - self.read, governor.rests()
            room = end - known - 1
            if not rests and not governor.measuring(1) and room:
                most = min(governor.most(1, behind, room), room)
            fed = 0
            if most:
                took = (most * self.step + behind * self.token) * STEP
                self.read, self.asked = known + most - 1, self.asked + 1
                fed = governor.choose([(0,) * most], 1)
            right = int(np.argmin([*(random.random(fed) < self.chance), False]))
            width = STEP * (1 + self.slope * fed)
            if not rests:
                tested = (Judged((0,) * fed, right),) if fed else ()
                governor.heard(Heard(fed + 1, width, took, most, 1, right + 1, tested, behind if most else 0))
            known, seconds = known + right + 1, seconds + width + took
            self.read = min(self.read, known - 1)
        return tokens * STEP / seconds


@pytest.mark.parametrize("prompt", [20, 300])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("step", [0.05, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("slope", [0.05, 0.3, 0.8])
def test_a_draft_never_costs_three_percent(step: float, chance: float, prompt: int, slope: float) -> None:
    """Also not the reading of a prompt, whatever it turns out to be good for: on the mean of some answers."""
    draft = Draft(step, chance, slope=slope)
    governor = draft.governor()
    gains = [draft.generated(governor, prompt, seed=seed) for seed in range(8)]
    assert np.mean(gains) > 0.975 and min(gains) > 0.955, gains


def test_a_draft_that_is_nearly_as_dear_as_its_package_is_never_asked_and_reads_nothing() -> None:
    for step in (0.7, 1.0, 1.5):
        draft = Draft(step, 0.95)
        assert draft.generated(draft.governor(), tokens=400) == pytest.approx(1.0) and not draft.asked


def test_a_small_draft_that_is_often_right_is_worth_reading_a_long_prompt() -> None:
    draft = Draft(0.05, 0.9)
    governor = draft.governor()
    assert draft.generated(governor, 40) > 2.0
    assert draft.generated(governor, 400) > 1.8, "it is known to be good now"


def test_a_draft_that_was_wrong_sleeps_and_wakes_when_its_guesses_may_be_better() -> None:
    draft = Draft(0.1, 0.05)
    governor = draft.governor()
    assert draft.generated(governor, tokens=300) > 0.97
    awake = draft.asked
    assert 0 < awake < 40
    draft.chance = 0.95
    draft.generated(governor, tokens=2000)
    assert draft.asked - awake > 100


def test_what_was_missed_is_charged_when_it_is_read() -> None:
    asking = Asking(0.001, 0.0001)
    assert asking.step == 0.001 and asking.reading(50) == pytest.approx(0.005)
    asking.add(0.004, 2, 0)
    assert asking.step == 0.002, "as it is beside the package, in place of what was measured before"
    for _ in range(3):
        asking.add(0.014, 2, 50)
    assert asking.step == 0.002 and asking.reading(10) == pytest.approx(0.002)
    assert Asking().step is None
