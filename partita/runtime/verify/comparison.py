"""Comparison of a package's logits with those of a known answer: errors, tokens, and positions that do not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.observations.text_format import plural
from partita.package.records import StepError

Logits = npt.NDArray[np.float32]

RULED_OUT = -1e30
"""Logits of a float32 reference below this mask a token out."""
OUTLIERS = 4
"""Logits of more than this many times the magnitude of the likeliest belong to padding tokens."""
LOWEST = -6e4
"""Logits in float16 below this mask a token out; its lowest number is -65504."""


@dataclass(slots=True)
class Comparison:
    """Our logits of one step against the reference's, position by position."""

    step: str
    output: str
    reference: Logits
    """[n, vocab]."""
    tolerance: float
    kind: str = ""
    """Steps of one kind are judged together by `set_aside`."""
    again: bool = False
    """Another step compares the same positions, and counts their near ties."""
    errors: dict[int, float] = field(default_factory=dict)
    """Position -> the largest difference of any row."""
    other_tokens: set[int] = field(default_factory=set)
    """Positions with another greedy token in any row."""
    ties: set[int] = field(default_factory=set)
    """Positions at which the reference's two best logits are within the tolerance."""
    set_aside: set[int] = field(default_factory=set)
    """Positions that do not count; see the function of that name."""
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        """Compute the scale of differences."""
        self.scale = scale_of(self.reference)

    def compare(self, position: int, ours: Logits) -> None:
        """Compare the logits [vocab] of one row of the batch with the reference at `position`."""
        wanted = self.reference[position]
        second, first = np.partition(wanted, -2)[-2:]
        tie = first - second <= 2 * self.tolerance * self.scale
        if tie:
            self.ties.add(position)
        error = difference(ours, wanted, self.scale)
        worst = max(self.errors.get(position, 0.0), error) if np.isfinite(error) else float("inf")
        self.errors[position] = worst
        if not tie and int(ours.argmax()) != int(wanted.argmax()):
            self.other_tokens.add(position)

    @property
    def off(self) -> set[int]:
        """Positions with finite errors above the tolerance, or another token."""
        most = self.tolerance * self.scale
        beyond = {position for position, error in self.errors.items() if not error <= most}
        return {position for position in beyond | self.other_tokens if np.isfinite(self.errors[position])}

    def result(self) -> StepError:
        """The step as a record; its error is infinite when it was not run."""
        counted = [error for position, error in self.errors.items() if position not in self.set_aside]
        largest = max(counted, default=0.0) if self.errors else float("inf")
        return StepError(
            step=self.step,
            output=self.output,
            max_abs_error=largest,
            max_rel_error=largest / self.scale,
            tokens_equal=self.other_tokens <= self.set_aside,
            rerouted=len(self.set_aside),
        )


def scale_of(reference: Logits) -> float:
    """Scale of differences: the largest magnitude, at most OUTLIERS times that of the likeliest tokens.

    The magnitude of the likeliest tokens is their distance from 0, or from the median of their row. Padding tokens of a
    vocabulary may have a bias of -10,000 and would hide every other difference, as masked tokens would.
    """
    spread = largest = 0.0
    for row in reference:
        there = row[row >= RULED_OUT]
        if len(there):
            first = float(there.max())
            spread = max(spread, abs(first), first - float(np.median(there)))
            largest = max(largest, first, -float(there.min()))
    return min(OUTLIERS * spread, largest) or 1.0


def difference(ours: Logits, wanted: Logits, scale: float) -> float:
    """Largest difference between the logits [vocab]; beyond `scale` relative to their own magnitude.

    Infinite where one of the two masks a token out and the other does not.
    """
    out = wanted < RULED_OUT
    if not (ours[out] <= LOWEST).all():
        return float("inf")
    apart = np.abs(ours[~out] - wanted[~out])
    far = np.abs(wanted[~out])
    return float((apart / np.maximum(far / scale, 1)).max(initial=0.0))


def set_aside(compared: Sequence[Comparison]) -> None:
    """Leave out positions at which rounding changes the choice of experts, if they are fewer than half of their kind.

    Where two experts are nearly equal, rounding decides between them, and no tolerance applies to what follows. A wrong
    kernel is off nearly everywhere, in prompts or in decoding.
    """
    kinds: dict[str, list[Comparison]] = {}
    for entry in compared:
        kinds.setdefault(entry.kind, []).append(entry)
    for entries in kinds.values():
        off = sum(len(entry.off) for entry in entries)
        if 2 * off < sum(len(entry.errors) for entry in entries):
            for entry in entries:
                entry.set_aside = entry.off


def but_for(compared: Sequence[Comparison]) -> str:
    """The number of positions that were left out, as the end of a sentence."""
    counted = [entry for entry in compared if not entry.again]
    count, positions = (sum(len(entry.set_aside) for entry in counted), sum(len(entry.errors) for entry in counted))
    if not count:
        return ""
    return (
        f", but for {count} of {plural(positions, 'position')}, at which rounding makes the model choose other experts"
    )
