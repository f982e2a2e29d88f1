"""What a quantiser is: it finds integers q, a scale s and a zero point z per block, so that s * (q - z) is near w."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Grid:
    """The integers that a weight may become."""

    bits: int
    symmetric: bool
    """The zero point is the middle of the range for every block; otherwise each block has an integer one of its own."""

    @property
    def top(self) -> int:
        """The largest integer; the smallest is 0."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric weight: 8 of 0 .. 15."""
        return 1 << (self.bits - 1)


class Quantised(NamedTuple):
    """R rows of M blocks of B weights each."""

    integers: torch.Tensor
    """[R, M, B] uint8."""
    scales: torch.Tensor
    """[R, M] float32; may be negative."""
    zeros: torch.Tensor
    """[R, M] uint8."""


Round = Callable[["torch.Tensor"], Quantised]
"""Finite weights [R, K] float32 -> blocks along K, of which the last is filled up with zeros. Rows do not know of each
other, so any number of them may be given at a time.
"""
Calibrate = Callable[["torch.Tensor", Grid, int], Round]
"""The mean of x x^T, float32 [K, K], over the inputs x of a product; grid and block size -> what rounds its rows."""


@dataclass(frozen=True, slots=True)
class Quantiser:
    """One way to choose the integers."""

    name: str
    summary: str
    """What it does, in a line."""
    quantise: Callable[[torch.Tensor, Grid], Quantised]
    """Finite weights [R, M, B] float32 -> integers, scales and zero points. Looks at weights only."""
    calibrate: Calibrate | None = None
    """How it rounds a weight whose inputs are known from a text; None: it takes no text."""


def steps(weights: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The nearest integers less the zero point, float32 [R, M, B]. `scales`, none 0, and `zeros`: [R, M, 1] float32."""
    return (weights / scales).round_().maximum(-zeros).minimum(grid.top - zeros)


def not_zero(scales: torch.Tensor) -> torch.Tensor:
    """Scales of which those that are 0, of blocks without any weight but 0, are 1."""
    return scales.masked_fill(scales == 0, 1.0)


def finished(found: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Quantised:
    """Steps [R, M, B], scales and zero points [R, M, 1], all float32, as they are stored."""
    import torch

    integers = (found + zeros).to(torch.uint8)
    return Quantised(integers, scales.squeeze(-1).contiguous(), zeros.squeeze(-1).to(torch.uint8))
