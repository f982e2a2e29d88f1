"""Records of quantisation: blocks of a weight -> integers q, a scale s and a zero point z per block.

s * (q - z) is near the weight. The quantisers in `rounding` get a few rows at a time, independent of graphs and files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

DEFAULT = "refit"
CALIBRATED = "gptq"
"""The quantiser with a calibration text."""


def without_text(name: str) -> str:
    """The quantiser for weights that the calibration text does not reach."""
    return DEFAULT if name == CALIBRATED else name


@dataclass(frozen=True, slots=True)
class Grid:
    """The integer range of a quantised weight."""

    bits: int
    symmetric: bool
    """The zero point is the middle of the range for every block; otherwise each block has an integer zero point."""

    @property
    def top(self) -> int:
        """The largest integer; the smallest is 0."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric weight: 8 of 0 .. 15."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True, slots=True)
class Packing:
    """The grid, block size and quantiser of a weight."""

    grid: Grid
    block_size: int
    """Weights of a row that share a scale and a zero point."""
    quantiser: str

    def blocks_in(self, width: int) -> int:
        """Blocks of a row of `width`; the last one may be padded."""
        return -(-width // self.block_size)

    @property
    def name(self) -> str:
        """The short name, e.g. int4."""
        return f"int{self.grid.bits}"


class Quantised(NamedTuple):
    """R rows of M blocks of B weights each."""

    integers: torch.Tensor
    """[R, M, B] uint8."""
    scales: torch.Tensor
    """[R, M] float32; may be negative."""
    zeros: torch.Tensor
    """[R, M] uint8."""


Round = Callable[["torch.Tensor"], Quantised]
"""Finite weights [R, K] float32 -> blocks along K, the last padded with zeros. Rows are independent."""
