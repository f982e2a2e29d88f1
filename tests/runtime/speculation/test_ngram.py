"""Guesses from the text itself: what followed the longest earlier occurrence of its end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partita.runtime.speculation.ngram import CLASSES, LONGEST, NgramGuesser


def guesses(text: Sequence[int], most: int = 4, guesser: NgramGuesser | None = None) -> list[int]:
    return [*(guesser or NgramGuesser())(np.array(text, np.int64), most).tokens]


def test_the_longest_earlier_occurrence_is_followed_and_not_the_latest() -> None:
    assert guesses([1, 2, 3, 9, 8, 7, 6, 2, 3, 5, 5, 1, 2, 3]) == [9, 8, 7, 6]


def test_of_occurrences_of_equal_length_the_latest_is_followed() -> None:
    assert guesses([2, 3, 9, 0, 2, 3, 8, 1, 2, 3], most=2) == [8, 1]


def test_a_single_token_will_do_where_no_two_stood_before() -> None:
    assert guesses([4, 5, 6, 1, 5], most=3) == [6, 1, 5]


def test_nothing_is_guessed_of_what_never_stood_before_nor_when_none_is_asked_for() -> None:
    assert guesses([1, 2, 3]) == [] and guesses([1]) == [] and guesses([1, 2, 1, 2], most=0) == []


def test_a_text_that_repeats_itself_goes_on_repeating_beyond_its_end() -> None:
    assert guesses([7, 1, 2, 3, 1, 2, 3], most=8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert guesses([5, 4, 4], most=3) == [4, 4, 4]


def test_guesses_after_a_longer_agreement_are_of_a_higher_class() -> None:
    text = [*range(30), 99, *range(25)]
    short, long = (NgramGuesser()(np.array(text[:count], np.int64), 3) for count in (32, len(text)))
    assert [*short.evidence] == [0, 1, 2]
    assert {*long.evidence} == {len(CLASSES) - 1}


def test_a_row_that_grows_and_goes_back_is_guessed_like_a_new_one() -> None:
    random = np.random.default_rng(3)
    guesser, text = NgramGuesser(), list[int]()
    for turn in range(400):
        text += random.integers(0, 5, random.integers(1, 4)).tolist()
        if turn % 17 == 16:  # the row was taken back, and another token stands there now
            del text[-int(random.integers(2, 9)) :]
            text.append(int(random.integers(0, 5)))
        if turn % 3:
            assert guesses(text, 5, guesser) == guesses(text, 5), turn
    assert longest_agreement(text, guesses(text, 1)[0]) >= 3


def longest_agreement(text: Sequence[int], token: int) -> int:
    """How many tokens before an earlier `token` are those at the end of the text, at most."""
    found = [0]
    for place in range(1, len(text)):
        count = 0
        while text[place] == token and count < min(place, LONGEST) and text[place - 1 - count] == text[-1 - count]:
            count += 1
        found.append(count)
    return max(found)
