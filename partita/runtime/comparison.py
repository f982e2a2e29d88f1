"""Logits of a package beside those of a known answer: how far off, which token, and what does not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.observations.text_format import plural
from partita.package_records import StepError

Logits = npt.NDArray[np.float32]

RULED_OUT = -1e30
"""Logits of the reference, which is in float32, below this are of tokens that the model must not write."""
OUTLIERS = 4
"""Logits of so many times the magnitude of the likeliest are of tokens that are never written."""
LOWEST = -6e4
"""The same in float16, whose lowest number is -65504."""


@dataclass(slots=True)
class Comparison:
    """Our logits of one step against the reference's, position by position."""

    step: str
    output: str
    reference: Logits
    """[n, vocab]."""
    tolerance: float
    kind: str = ""
    """Steps of one kind are looked at together."""
    again: bool = False
    """What another step compares, too: its near ties are counted there."""
    errors: dict[int, float] = field(default_factory=dict)
    """Position -> the largest difference of any row."""
    other_tokens: set[int] = field(default_factory=set)
    """Positions with another greedy token in any row."""
    ties: set[int] = field(default_factory=set)
    """Positions at which the reference's two best logits cannot be told apart."""
    set_aside: set[int] = field(default_factory=set)
    """Positions that do not count; see the function of that name."""
    scale: float = field(init=False)
    """See `scale_of`."""

    def __post_init__(self) -> None:
        """Find the scale."""
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
        """Positions that differ by more than is allowed, by finite numbers."""
        most = self.tolerance * self.scale
        beyond = {position for position, error in self.errors.items() if not error <= most}
        return {position for position in beyond | self.other_tokens if np.isfinite(self.errors[position])}

    def result(self) -> StepError:
        """The step as a record; one that was not run agrees with nothing."""
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
    """What differences are measured by: the largest magnitude, unless it is many times that of the likeliest tokens.

    Theirs is how far they are from 0, or above the middle of their rows. Some vocabularies are padded with tokens whose
    bias is -10,000, beside which no difference between tokens that are written would count; nor does what a model
    rules out.
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
    """Largest difference between the logits [vocab], of those beyond `scale` in proportion to their own magnitude.

    Infinite where a token is ruled out by one of the two alone: some models give the lowest float to tokens that they
    must not write, which is not the same in every precision and beside which no other difference would count.
    """
    out = wanted < RULED_OUT
    if not (ours[out] <= LOWEST).all():
        return float("inf")
    apart = np.abs(ours[~out] - wanted[~out])
    far = np.abs(wanted[~out])
    return float((apart / np.maximum(far / scale, 1)).max(initial=0.0))


def set_aside(compared: Sequence[Comparison]) -> None:
    """Leave out positions at which rounding made the model choose otherwise, as long as they are the fewer.

    Where two experts are nearly equally good, rounding alone decides between them, and what follows is another
    computation: no tolerance says whether it is right. A kernel that computes something else is off nearly everywhere,
    in prompts or in decoding. So each kind of step has to agree at more than half of its positions.
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
    """What was left out, as the end of a sentence."""
    told = [entry for entry in compared if not entry.again]
    count, positions = (sum(map(len, sets)) for sets in ([e.set_aside for e in told], [e.errors for e in told]))
    if not count:
        return ""
    return (
        f", but for {count} of {plural(positions, 'position')}, at which rounding makes the model choose other experts"
    )
