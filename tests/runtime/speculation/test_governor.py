"""How many guesses are fed: in a time that is computed from what steps cost, so that every run is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from partita.runtime.engine.guesses import Heard, Judged
from partita.runtime.speculation import ngram
from partita.runtime.speculation.asking import Asking
from partita.runtime.speculation.governor import Governor
from partita.runtime.speculation.ngram import NgramGuesser

STEP = 0.002
LOOK = 0.00002
"""Seconds of a step of one token, and of looking for guesses."""
RANDOM = np.random.default_rng(8)
RANDOM_TEXT = RANDOM.integers(0, 30, 400).tolist()
"""Its tokens stood before, and never followed by the same."""
REPEATING = [*range(100, 112), *RANDOM.integers(0, 60, 5).tolist()] * 30


def linear(slope: float) -> Callable[[int], float]:
    return lambda width: STEP * (1 + slope * (width - 1))


def generated(
    text: Sequence[int], cost: Callable[[int], float], governor: Governor, *, prompt: int = 40, look: float = LOOK
) -> tuple[float, list[int]]:
    """Speed of a generation of `text` by that without guesses, and the widths of its steps."""
    whole, guesser = np.array(text, np.int64), NgramGuesser()
    known, seconds, widths = prompt, 0.0, list[int]()
    while known < len(text):
        rests = governor.rests()
        looks = not rests and not governor.measuring(1) and (most := governor.most(1))
        offered, evidence = guesser(whole[:known], most) if looks else ((), ())
        looked = look if looks else 0.0
        count = governor.choose([tuple(evidence)] if offered else [], 1) if looks else 0
        count = min(count, len(text) - known - 1)
        fed, kinds = offered[:count], tuple(evidence[:count])
        right = 0
        while right < len(fed) and fed[right] == text[known + right]:
            right += 1
        width = len(fed) + 1
        tested = (Judged(kinds, right),) if fed else ()
        if not rests:
            governor.heard(Heard(width, cost(width), looked, len(offered), 1, right + 1, tested))
        known, seconds = known + right + 1, seconds + cost(width) + looked
        widths.append(width)
    return (len(text) - prompt) * STEP / seconds, widths


@pytest.mark.parametrize(("slope", "least"), [(0.02, 4.0), (0.12, 2.5), (0.3, 1.6), (0.6, 1.2)])
def test_a_text_that_repeats_itself_gains_by_what_more_tokens_cost(slope: float, least: float) -> None:
    gain, _ = generated(REPEATING, linear(slope), Governor(ngram.PRIORS))
    assert gain > least


@pytest.mark.parametrize("slope", [0.02, 0.12, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("text", [RANDOM_TEXT, RANDOM_TEXT[:170]], ids=["long", "short"])
def test_guesses_that_are_wrong_cost_less_than_three_percent(text: list[int], slope: float) -> None:
    gain, _ = generated(text, linear(slope), Governor(ngram.PRIORS))
    assert gain > 0.97


def test_where_nothing_is_found_nobody_looks_in_most_steps_and_what_begins_is_found_soon() -> None:
    governor, looks = Governor(ngram.PRIORS), 0
    for _ in range(4):
        governor.heard(Heard(1, STEP, 0.0, 0, 1, 1, ()))
    for _ in range(90):
        if not governor.rests():
            looks += 1
            assert governor.most(1) and not governor.choose([], 1)
            governor.heard(Heard(1, STEP, LOOK, 0, 1, 1, ()))
    assert 8 < looks < 20
    rested = 0
    while governor.rests():
        rested += 1
    assert rested <= 8 and governor.most(1) and governor.choose([(5, 5)], 1)


def test_a_rest_of_one_generation_is_none_of_the_next() -> None:
    governor = Governor(ngram.PRIORS)
    generated(RANDOM_TEXT, linear(0.6), governor, look=0.3 * STEP)
    while not governor.rests():
        governor.choose([(0,)], 1)
    governor.begin()
    assert not governor.rests()


def test_what_was_won_is_not_lost_again_for_thousands_of_tokens() -> None:
    """As in a long text that repeats itself first, or between the requests of a server."""
    governor = Governor(ngram.PRIORS)
    for _ in range(4):
        governor.heard(Heard(1, STEP, 0.0, 0, 1, 1, ()))
    for _ in range(300):
        governor.heard(Heard(4, 1.3 * STEP, 0.0, 3, 1, 4, (Judged((5, 5, 5), 3),)))
    lost = 0
    while governor.most(1):
        governor.heard(Heard(4, 1.3 * STEP, 0.0, 3, 1, 1, (Judged((5, 5, 5), 0),)))
        lost += 1
    assert 20 < lost < 200, lost


@pytest.mark.parametrize("asked", [0, 3])
def test_a_look_that_had_to_wait_once_does_not_empty_the_account(asked: int) -> None:
    governor = Governor(ngram.PRIORS)
    for _ in range(4):
        governor.heard(Heard(1, STEP, LOOK, 3, 1, 1, ()))
    for _ in range(20):
        governor.heard(Heard(1, STEP, LOOK, asked, 1, 1, ()))
    governor.heard(Heard(1, STEP, 10 * STEP, asked, 1, 1, ()))
    assert governor.most(1)


def test_where_a_wider_step_costs_as_much_as_its_tokens_apart_none_is_made_for_long() -> None:
    gain, widths = generated(REPEATING, linear(1.1), Governor(ngram.PRIORS))
    assert gain > 0.97 and sum(width > 1 for width in widths) < 0.1 * len(widths)


def test_it_turns_itself_off_where_a_text_ends_that_it_could_guess_and_on_again() -> None:
    text = [*REPEATING[:200], *RANDOM_TEXT[:300], *REPEATING[:200]]
    _, widths = generated(text, linear(0.4), Governor(ngram.PRIORS))
    fed = np.cumsum(widths)
    lost = [width for width, at in zip(widths, fed, strict=True) if 250 < at < 450]
    assert np.mean(np.array(lost) > 1) < 0.15
    assert max(widths[-8:]) > 4, "it has begun again"


def test_a_step_is_made_without_guesses_now_and_then_to_compare_with() -> None:
    _, widths = generated([5] * 2000, linear(0.1), Governor(ngram.PRIORS))
    assert widths[:2] == [1, 1] and 1 in widths[60:]


def test_a_step_that_had_to_wait_once_is_tried_again() -> None:
    """Its time is no cost: the machine did something else."""
    waited: list[int] = []

    def cost(width: int) -> float:
        late = width > 1 and len(waited) < 2
        if late:
            waited.append(width)
        return linear(0.1)(width) + (30 * STEP if late else 0)

    _, widths = generated([*REPEATING, *REPEATING, *REPEATING], cost, Governor(ngram.PRIORS))
    assert len(waited) == 2 and np.mean(np.array(widths[len(widths) // 2 :]) > 1) > 0.9


def test_guesses_that_cost_much_to_make_are_asked_for_only_as_long_as_they_pay() -> None:
    """As those of a draft do: each takes a run of it."""

    def asked(chance: float, seconds: float) -> int:
        governor, random, count = Governor((0.6,), asking=Asking()), np.random.default_rng(1), 0
        for _ in range(400):
            if governor.rests():
                continue
            most = 0 if governor.measuring(1) else governor.most(1)
            fed = min(most, governor.choose([(0,) * most], 1)) if most else 0
            right = int(np.argmin([*(random.random(fed) < chance), False]))
            tested = (Judged((0,) * fed, right),) if fed else ()
            governor.heard(Heard(fed + 1, linear(0.05)(fed + 1), most * seconds, most, 1, right + 1, tested))
            count += bool(most)
        return count

    assert asked(0.9, 0.1 * STEP) > 300
    assert asked(0.1, 0.1 * STEP) < 100
    assert asked(0.9, 1.2 * STEP) < 60


def test_the_first_guess_of_a_draft_is_one_that_says_what_they_take() -> None:
    """Ten of a draft that is half as fast as the model would take as long as five tokens."""
    governor = Governor((0.6,), asking=Asking())
    for _ in range(4):
        governor.heard(Heard(1, STEP, 0.0, 0, 1, 1, ()))
    assert governor.most(1) == 1
    seconds, plain = 0.0, 0
    while plain < 100:
        most = 0 if governor.rests() else governor.most(1)
        seconds += STEP + most * STEP / 2
        plain += 1
        governor.heard(Heard(1, STEP, most * STEP / 2, most, 1, 1, ()))
    assert 100 * STEP / seconds > 0.97


def test_rows_beside_each_other_are_weighed_together() -> None:
    """Every row pays for a wider step: one of eight that guesses well is not worth it, eight are."""
    governor = Governor((0.9,))
    for _ in range(4):
        governor.heard(Heard(1, STEP, 0.0, 0, 8, 8, ()))
    offer = (0,) * 3
    assert governor.choose([offer], 8) == 0
    assert governor.choose([offer] * 8, 8) == 1, "as much as may be lost at the beginning"


def test_a_step_of_several_rows_says_nothing_of_one_of_a_row_alone() -> None:
    """It takes longer, so that guesses would look cheap beside it."""
    governor = Governor((0.6,))
    for _ in range(4):
        governor.heard(Heard(1, 3 * STEP, 0.0, 0, 4, 4, ()))
    assert not governor.measuring(4) and governor.measuring(1)
    for _ in range(4):
        governor.heard(Heard(1, STEP, 0.0, 0, 1, 1, ()))
        governor.heard(Heard(2, 2.1 * STEP, 0.0, 1, 1, 1, ()))
    assert not governor.measuring(1)
    assert governor.choose([(0,)], 1) == 0, "twice the time for 1.6 tokens"
    assert governor.costs(1).of(1) == STEP and governor.costs(4).of(1) == 3 * STEP


@pytest.mark.parametrize("look", [LOOK, 0.1 * STEP, 0.2 * STEP])
@pytest.mark.parametrize("slope", [0.1, 0.3, 0.6])
def test_what_was_won_in_one_generation_is_not_lost_in_the_next(slope: float, look: float) -> None:
    governor = Governor(ngram.PRIORS)
    generated(REPEATING, linear(slope), governor, look=look)
    governor.begin()
    gain, _ = generated(RANDOM_TEXT[:190], linear(slope), governor, look=look)
    assert gain > 0.965


def test_where_guesses_have_won_it_takes_more_to_stop_asking_for_them() -> None:
    """Finding guesses that are then not worth it takes a fifth of a step here."""
    asked = []
    for tokens in (1, 4):
        governor = Governor(ngram.PRIORS)
        for _ in range(4):
            governor.heard(Heard(1, STEP, 0.0, 0, 1, 1, ()))
        for _ in range(40):
            governor.heard(Heard(4, 1.3 * STEP, 0.2 * STEP, 3, 1, tokens, (Judged((5, 5, 5), tokens - 1),)))
        governor.begin()
        lost = 0
        while governor.most(1):
            governor.heard(Heard(1, STEP, 0.2 * STEP, 3, 1, 1, ()))
            lost += 1
        asked.append(lost)
    assert asked[0] <= 3 and 7 <= asked[1] <= 12


def test_a_guess_that_was_right_and_ended_its_row_makes_its_class_likelier() -> None:
    """An end that is guessed again and again would else be thought ever less likely."""
    likelier, less = Governor((0.5, 0.5, 0.5)), Governor((0.5, 0.5, 0.5))
    likelier.heard(Heard(4, STEP, 0.0, 3, 1, 2, (Judged((0, 1, 2), 1, ended=True),)))
    less.heard(Heard(4, STEP, 0.0, 3, 1, 2, (Judged((0, 1, 2), 1),)))
    assert likelier.acceptance.of(1) > 0.5 > less.acceptance.of(1)
    assert likelier.acceptance.of(2) == 0.5, "what stood behind the end was never tried"
