"""Guessing that depends neither on how fast a machine is nor on what a text repeats: what is guessed is fed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from partita.runtime.engine.guesses import Guessed
from partita.runtime.speculation import ngram
from partita.runtime.speculation.governor import Governor

WRONG = 7
"""Of so many tokens of a text one is guessed wrong."""


def feed_all(patch: pytest.MonkeyPatch, most: int = 5) -> None:
    """Whatever steps cost, so many guesses are asked for and fed."""
    patch.setattr(Governor, "measuring", lambda self, live: False)
    patch.setattr(Governor, "most", lambda self, live, behind=0, room=0: most)
    patch.setattr(Governor, "choose", lambda self, offers, live: most)


def knowing(patch: pytest.MonkeyPatch, *texts: Sequence[int]) -> None:
    """Whoever guesses from the text so far knows these texts, and is wrong at some places of them."""

    class Knows(ngram.NgramGuesser):
        def __call__(self, history: npt.NDArray[np.int64], most: int, /) -> Guessed:
            begin = history.tolist()
            for text in texts:
                if list(text[: len(begin)]) == begin:
                    places = range(len(begin), min(len(begin) + most, len(text)))
                    return Guessed([text[place] ^ (place % WRONG == 0) for place in places], [0] * len(places))
            return Guessed()

    patch.setattr(ngram, "NgramGuesser", Knows)
