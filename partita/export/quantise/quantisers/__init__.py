"""Quantisers, one file each: blocks of a weight -> integers q, a scale s and a zero point z per block.

s * (q - z) is near the weight. Quantisers get a few rows at a time, independent of graphs, files and packing.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


DEFAULT = "refit"
CALIBRATED = "gptq"
"""The quantiser with a calibration text."""
CALIBRATING = frozenset({CALIBRATED})
"""Quantisers that need a text, listed so that options are checked without importing torch."""


def names() -> tuple[str, ...]:
    """Names of all quantisers, sorted. Imports none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


def quantiser(name: str) -> Quantiser:
    """The quantiser with this name."""
    found = importlib.import_module(f"{__name__}.{name}").QUANTISER
    assert isinstance(found, Quantiser)
    return found


def without_text(name: str) -> str:
    """The quantiser for weights that the calibration text does not reach."""
    return name if quantiser(name).calibrate is None else DEFAULT


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
Calibrate = Callable[["torch.Tensor", Grid, int], Round]
"""The mean of x x^T, float32 [K, K], over the inputs x of a product; grid and block size -> a function for its rows."""


@dataclass(frozen=True, slots=True)
class Quantiser:
    """A method that chooses the integers."""

    quantise: Callable[[torch.Tensor, Grid], Quantised]
    """Finite weights [R, M, B] float32 -> integers, scales and zero points, from the weights alone."""
    calibrate: Calibrate | None = None
    """Quantises a weight with known inputs; None: it uses no text."""


def columns(weights: torch.Tensor) -> torch.Tensor:
    """Blocks [R, M, B] as the columns of a matrix [B, R * M], so that what is done per block runs along memory."""
    return weights.flatten(0, 1).T.contiguous()


def steps(weights: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The nearest integers minus the zero point, float32 [B, P]. `scales` (not 0) and `zeros`: [P] float32."""
    return (weights / scales).round_().clamp_(-zeros, grid.top - zeros)


def column_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums [P] of the columns of [B, P], by halves: the order of `torch.sum` depends on the number of columns."""
    while len(values) > 1:
        half = len(values) // 2
        folded = values[:half] + values[half : 2 * half]
        if len(values) % 2:
            folded[0] += values[-1]
        values = folded
    return values[0]


def not_zero(scales: torch.Tensor) -> torch.Tensor:
    """Scales with 0 (blocks of zeros) replaced by 1."""
    return scales.masked_fill(scales == 0, 1.0)


def in_blocks(found: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, rows: int) -> Quantised:
    """Steps [B, P], scales and zero points [P], all float32, as blocks of `rows` rows in their storage dtypes."""
    import torch

    integers = (found + zeros).T.contiguous().to(torch.uint8)
    return Quantised(integers.view(rows, -1, len(found)), scales.view(rows, -1), zeros.to(torch.uint8).view(rows, -1))


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
