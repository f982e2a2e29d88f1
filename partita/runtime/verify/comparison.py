"""Compares a package's logits with reference logits: errors, greedy tokens, and excluded positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.observations.text_format import plural
from partita.package.records import StepError

Logits = npt.NDArray[np.float32]

RULED_OUT = -1e30
"""float32 reference logits below this value are masked."""
OUTLIERS = 4
"""Logits above this multiple of the most likely token's magnitude belong to padding tokens."""
LOWEST = -6e4
"""float16 logits below this value are masked; the minimum of float16 is -65504."""


@dataclass(slots=True)
class Comparison:
    """Comparison of one step's logits with the reference, position by position."""

    step: str
    output: str
    reference: Logits
    """[n, vocab]."""
    tolerance: float
    kind: str = ""
    """Steps of one kind are evaluated together by `set_aside`."""
    is_repeated: bool = False
    """Another step compares the same positions and counts their near ties."""
    errors: dict[int, float] = field(default_factory=dict)
    """Position -> maximum difference over all rows."""
    other_tokens: set[int] = field(default_factory=set)
    """Positions with a different greedy token in any row."""
    ties: set[int] = field(default_factory=set)
    """Positions at which the reference's two largest logits are within the tolerance."""
    excluded: set[int] = field(default_factory=set)
    """Excluded positions; see `set_aside`."""
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        """Set the scale of differences."""
        self.scale = scale_of(self.reference)

    def compare(self, position: int, ours: Logits) -> None:
        """Compare the logits [vocab] of one row of the batch with the reference at `position`."""
        expected = self.reference[position]
        second, first = np.partition(expected, -2)[-2:]
        tie = first - second <= 2 * self.tolerance * self.scale
        if tie:
            self.ties.add(position)
        error = difference(ours, expected, self.scale)
        worst = max(self.errors.get(position, 0.0), error) if np.isfinite(error) else float("inf")
        self.errors[position] = worst
        if not tie and int(ours.argmax()) != int(expected.argmax()):
            self.other_tokens.add(position)

    @property
    def mismatches(self) -> set[int]:
        """Positions with finite errors above the tolerance, or a different greedy token."""
        most = self.tolerance * self.scale
        beyond = {position for position, error in self.errors.items() if not error <= most}
        return {position for position in beyond | self.other_tokens if np.isfinite(self.errors[position])}

    def result(self) -> StepError:
        """The step as a record; its error is infinite if it was not run."""
        counted = [error for position, error in self.errors.items() if position not in self.excluded]
        largest = max(counted, default=0.0) if self.errors else float("inf")
        return StepError(
            step=self.step,
            output=self.output,
            max_abs_error=largest,
            max_rel_error=largest / self.scale,
            tokens_equal=self.other_tokens <= self.excluded,
            rerouted=len(self.excluded),
        )


def scale_of(reference: Logits) -> float:
    """Scale of differences: the largest magnitude, at most OUTLIERS times that of the most likely tokens.

    The magnitude of the most likely tokens is their distance from 0, or from the median of their row. Padding tokens
    may have a bias of -10,000, which would hide other differences, as masked tokens would.
    """
    spread = largest = 0.0
    for row in reference:
        there = row[row >= RULED_OUT]
        if len(there):
            first = float(there.max())
            spread = max(spread, abs(first), first - float(np.median(there)))
            largest = max(largest, first, -float(there.min()))
    return min(OUTLIERS * spread, largest) or 1.0


def difference(ours: Logits, expected: Logits, scale: float) -> float:
    """Largest difference between the logits [vocab]; above `scale`, relative to their own magnitude.

    Infinite if only one of the two masks a token.
    """
    out = expected < RULED_OUT
    if not (ours[out] <= LOWEST).all():
        return float("inf")
    apart = np.abs(ours[~out] - expected[~out])
    far = np.abs(expected[~out])
    return float((apart / np.maximum(far / scale, 1)).max(initial=0.0))


def set_aside(compared: Sequence[Comparison]) -> None:
    """Exclude positions at which rounding changes the selected experts, if fewer than half of their kind.

    When two experts have nearly equal scores, rounding decides between them. A wrong kernel affects nearly all
    positions, in prefill or decode.
    """
    kinds: dict[str, list[Comparison]] = {}
    for entry in compared:
        kinds.setdefault(entry.kind, []).append(entry)
    for entries in kinds.values():
        off = sum(len(entry.mismatches) for entry in entries)
        if 2 * off < sum(len(entry.errors) for entry in entries):
            for entry in entries:
                entry.excluded = entry.mismatches


def but_for(compared: Sequence[Comparison]) -> str:
    """The number of excluded positions, as the end of a sentence."""
    counted = [entry for entry in compared if not entry.is_repeated]
    count, positions = (sum(len(entry.excluded) for entry in counted), sum(len(entry.errors) for entry in counted))
    if not count:
        return ""
    return f", except {count} of {plural(positions, 'position')}, where rounding selects other experts"
