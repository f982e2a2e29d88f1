"""How often guesses prove right, by the class that their guesser gives them; what is long past counts less."""

from __future__ import annotations

from collections.abc import Sequence

FADES = 0.97
"""What is left of a class's counts after another guess of it: the last 30 or so speak for the next."""
DECLINED = 0.98
"""The same for a guess that was not fed: after a while it is tried again."""
WEIGHT = 2.0
"""How many guesses what is thought of a class beforehand counts for."""


class Acceptance:
    """Share of right guesses by class, of those whose predecessors were all right: the others were never judged."""

    def __init__(self, priors: Sequence[float]) -> None:
        """`priors`: the share that is thought of each class before any guess of it was judged."""
        self._priors = tuple(priors)
        self._right = [0.0] * len(self._priors)
        self._judged = [0.0] * len(self._priors)

    def of(self, evidence: int) -> float:
        """The chance, 0 .. 1, that a guess of this class is right where those before it are."""
        right = self._right[evidence] + WEIGHT * self._priors[evidence]
        return right / (self._judged[evidence] + WEIGHT)

    @property
    def known(self) -> float:
        """How far what is known of guesses is of what was judged, 0 .. 1, and not what was thought beforehand."""
        judged = sum(self._judged)
        return judged / (judged + WEIGHT)

    @property
    def typical(self) -> float:
        """The chance of a guess of no known class, by what was judged of all."""
        right, judged = sum(self._right), sum(self._judged)
        prior = sum(self._priors) / len(self._priors)
        return (right + WEIGHT * prior) / (judged + WEIGHT)

    def judge(self, evidence: Sequence[int], confirmed: int) -> None:
        """The first `confirmed` of the guesses were right, and the next one, if there is one, was wrong."""
        for place, kind in enumerate(evidence[: confirmed + 1]):
            self._fade(kind, FADES)
            self._judged[kind] += 1
            self._right[kind] += place < confirmed

    def decline(self, evidence: Sequence[int]) -> None:
        """Guesses of these classes were not fed."""
        for kind in dict.fromkeys(evidence):
            self._fade(kind, DECLINED)

    def decline_all(self, steps: int = 1) -> None:
        """No guesses were asked for in so many steps."""
        for kind in range(len(self._priors)):
            self._fade(kind, DECLINED**steps)

    def _fade(self, kind: int, factor: float) -> None:
        self._right[kind] *= factor
        self._judged[kind] *= factor
