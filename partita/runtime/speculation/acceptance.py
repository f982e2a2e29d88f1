"""How often guesses prove right, by the class that their guesser gives them; what is long past counts less."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        self._chances = [*self._priors]
        self._unasked = 0
        """Steps in which no guesses were asked for."""
        self._faded = [0] * len(self._priors)
        """How many of these a class's counts have faded by: a class is only looked at when it is needed."""

    def of(self, evidence: int) -> float:
        """The chance, 0 .. 1, that a guess of this class is right where those before it are."""
        if self._faded[evidence] != self._unasked:
            self._count(evidence, 1.0)
        return self._chances[evidence]

    @property
    def known(self) -> float:
        """How far what is known of guesses is of what was judged, 0 .. 1, and not what was thought beforehand."""
        self._fade()
        judged = sum(self._judged)
        return judged / (judged + WEIGHT)

    @property
    def typical(self) -> float:
        """The chance of a guess of no known class, by what was judged of all."""
        self._fade()
        right, judged = sum(self._right), sum(self._judged)
        prior = sum(self._priors) / len(self._priors)
        return (right + WEIGHT * prior) / (judged + WEIGHT)

    def judge(self, evidence: Sequence[int], confirmed: int) -> None:
        """The first `confirmed` of the guesses were right, and the next one, if there is one, was wrong."""
        for place, kind in enumerate(evidence[: confirmed + 1]):
            self._count(kind, FADES, 1.0, place < confirmed)

    def decline(self, kinds: Iterable[int]) -> None:
        """Guesses that begin with one of these classes were not fed."""
        for kind in kinds:
            self._count(kind, DECLINED)

    def decline_all(self, steps: int = 1) -> None:
        """No guesses were asked for in so many steps."""
        self._unasked += steps

    def _fade(self) -> None:
        for kind in range(len(self._priors)):
            self._count(kind, 1.0)

    def _count(self, kind: int, fades: float, judged: float = 0.0, right: float = 0.0) -> None:
        if self._faded[kind] != self._unasked:
            fades *= DECLINED ** (self._unasked - self._faded[kind])
            self._faded[kind] = self._unasked
        self._right[kind] = self._right[kind] * fades + right
        self._judged[kind] = self._judged[kind] * fades + judged
        self._chances[kind] = (self._right[kind] + WEIGHT * self._priors[kind]) / (self._judged[kind] + WEIGHT)
