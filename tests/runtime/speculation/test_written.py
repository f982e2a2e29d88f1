"""What a package has written before is found by its last tokens, and the oldest of it is forgotten."""

from __future__ import annotations

import numpy as np

from partita.runtime.speculation.ngram import CLASSES, NgramGuesser
from partita.runtime.speculation.written import PLACES, Written, agreement


def guesses(written: Written, text: list[int], most: int = 4) -> tuple[list[int], list[int]]:
    made = NgramGuesser(written)(np.array(text, np.int64), most)
    return [*made.tokens], [*made.evidence]


def test_an_answer_of_before_is_gone_on_with() -> None:
    written = Written()
    written.add([1, 2, 3, 4, 5, 6, 7])
    tokens, evidence = guesses(written, [9, 2, 3, 4])
    assert tokens == [5, 6, 7]
    assert min(evidence) >= len(CLASSES)
    assert guesses(written, [9, 9, 3, 4]) == ([], [])


def test_the_text_itself_counts_for_more_unless_an_answer_agrees_for_longer() -> None:
    written = Written()
    written.add([1, 2, 3, 4, 5, 6])
    assert guesses(written, [2, 3, 4, 8, 0, 2, 3, 4], most=1)[0] == [8]
    assert guesses(written, [3, 4, 8, 0, 2, 3, 4], most=1)[0] == [5]


def test_of_answers_that_agree_equally_the_latest_is_followed() -> None:
    written = Written()
    written.add([0, 1, 2, 3, 4])
    written.add([9, 1, 2, 3, 5])
    assert guesses(written, [1, 2, 3], most=1)[0] == [5]
    assert guesses(written, [0, 1, 2, 3], most=1)[0] == [4]


def test_the_oldest_answers_are_forgotten_and_what_is_kept_is_bounded() -> None:
    written = Written(kept=100)
    written.add([5, 6, 7, 8, 9])
    for begin in range(1000, 3000, 50):
        written.add(range(begin, begin + 50))
        assert sum(len(part.text) for part in written._parts) <= 200
    assert guesses(written, [5, 6, 7])[0] == []
    assert guesses(written, [2970, 2971, 2972])[0] == [2973, 2974, 2975, 2976]


def test_of_an_answer_that_is_longer_than_what_is_kept_the_end_is_kept() -> None:
    written = Written(kept=10)
    written.add(range(100))
    assert guesses(written, [94, 95, 96], most=2)[0] == [97, 98]
    assert guesses(written, [4, 5, 6])[0] == []


def test_an_answer_of_one_token_over_and_over_is_as_quick_to_look_up() -> None:
    written = Written()
    written.add([3] * 1000)
    assert [len(places) for places in written._parts[0].places.values()] == [PLACES]
    assert guesses(written, [3, 3, 3])[0]


def test_agreement_ends_at_the_beginning_of_either_text() -> None:
    assert agreement([1, 2, 3], 3, [1, 2, 3], 2) == 3
    assert agreement([0, 1, 2, 3], 4, [1, 2, 3], 1) == 3
    assert agreement([1, 2, 3], 3, [0, 1, 2, 3], 1) == 3
