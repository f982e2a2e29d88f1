"""Draft tokens from the text itself: what followed the longest earlier occurrence of its end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partita.runtime.speculation.ngram import NgramDrafter


def drafts(text: Sequence[int], most: int = 4, drafter: NgramDrafter | None = None) -> list[int]:
    return (drafter or NgramDrafter())(np.array(text, np.int64), most)


def test_the_longest_earlier_occurrence_is_followed_and_not_the_latest() -> None:
    assert drafts([1, 2, 3, 9, 8, 7, 6, 2, 3, 5, 5, 1, 2, 3]) == [9, 8, 7, 6]


def test_of_occurrences_of_equal_length_the_latest_is_followed() -> None:
    assert drafts([2, 3, 9, 0, 2, 3, 8, 1, 2, 3], most=2) == [8, 1]


def test_there_is_no_draft_without_two_tokens_that_occurred_before() -> None:
    assert drafts([1, 2, 3]) == [] and drafts([1]) == [] and drafts([4, 5, 6, 1, 5]) == []
    assert drafts([1, 2, 1, 2], most=0) == []


def test_a_text_that_repeats_itself_goes_on_repeating_beyond_its_end() -> None:
    assert drafts([7, 1, 2, 3, 1, 2, 3], most=8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert drafts([5, 4, 4, 4], most=3) == [4, 4, 4]


def test_a_row_that_grows_and_is_rewound_has_the_drafts_of_a_new_one() -> None:
    random = np.random.default_rng(3)
    drafter, text = NgramDrafter(), list[int]()
    for turn in range(400):
        text += random.integers(0, 5, random.integers(1, 4)).tolist()
        if turn % 17 == 16:  # rewound, and continued with another token
            del text[-int(random.integers(2, 9)) :]
            text.append(int(random.integers(0, 5)))
        if turn % 3:
            assert drafts(text, 5, drafter) == drafts(text, 5), turn
