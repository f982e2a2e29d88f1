"""Drafting that depends neither on the speed of the machine nor on repetition in a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from partita.runtime.generate.choice.drafting import DraftLength

WRONG = 7
"""One of so many draft tokens is wrong."""


def always_draft(patch: pytest.MonkeyPatch, most: int = 5) -> None:
    """So many draft tokens in each step, whatever steps cost."""
    patch.setattr(DraftLength, "count", lambda self: most)


def knowing(patch: pytest.MonkeyPatch, *texts: Sequence[int]) -> None:
    """N-gram lookup knows these texts, and is wrong at some places of them."""

    def drafter(history: npt.NDArray[np.int64], most: int) -> list[int]:
        begin = history.tolist()
        for text in texts:
            if list(text[: len(begin)]) == begin:
                places = range(len(begin), min(len(begin) + most, len(text)))
                return [text[place] ^ (place % WRONG == 0) for place in places]
        return []

    patch.setattr("partita.library.engine.drafters.ngram_draft", drafter)
