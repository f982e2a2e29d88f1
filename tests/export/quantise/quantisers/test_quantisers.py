"""Quantisers: integer range, error bounds, exact values on the grid, and the default quantiser."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from partita.export.quantise.quantisers import DEFAULT, Grid, Quantised, names, quantiser
from partita.export.trace import attention
from partita.export.trace.attention import GROWING
from partita.options.export import Attention, Quantiser

GRIDS = [Grid(bits, symmetric) for bits in (4, 8) for symmetric in (False, True)]


def weights(rows: int = 16, count: int = 6, size: int = 32) -> torch.Tensor:
    """[R, M, B] with the heavy tails that trained weights have."""
    generator = torch.Generator().manual_seed(0)
    chi = torch.randn(6, rows, count, size, generator=generator).square().mean(0)
    return torch.randn(rows, count, size, generator=generator) / chi.sqrt() * 0.02


def values(found: Quantised) -> torch.Tensor:
    """What the integers stand for."""
    return (found.integers.float() - found.zeros.float()[..., None]) * found.scales[..., None]


def error(blocks: torch.Tensor, name: str, grid: Grid) -> float:
    """Relative to the weights."""
    return float((values(quantiser(name).quantise(blocks, grid)) - blocks).norm() / blocks.norm())


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_integers_are_in_range_and_error_is_bounded(name: str, grid: Grid) -> None:
    blocks = weights()
    found = quantiser(name).quantise(blocks, grid)
    assert found.integers.dtype == found.zeros.dtype == torch.uint8 and found.scales.dtype == torch.float32
    assert found.integers.shape == blocks.shape and found.scales.shape == found.zeros.shape == blocks.shape[:2]
    assert int(found.integers.max()) <= grid.top and int(found.zeros.max()) <= grid.top
    if grid.symmetric:
        assert (found.zeros == grid.middle).all()
    assert error(blocks, name, grid) < (0.12 if grid.bits == 4 else 0.01)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_values_on_the_grid_are_exact(name: str, grid: Grid) -> None:
    """Includes a block of zeros."""
    steps = torch.linspace(0, grid.top, 32).round() - grid.middle
    blocks = torch.stack([steps * 0.125, torch.zeros(32)])[None]
    assert torch.allclose(values(quantiser(name).quantise(blocks, grid)), blocks, atol=1e-6 * float(blocks.abs().max()))


@pytest.mark.parametrize("symmetric", [False, True])
def test_default_quantiser_has_lower_error_than_nearest(symmetric: bool) -> None:
    assert DEFAULT == "refit"
    grid = Grid(4, symmetric)
    assert error(weights(), "refit", grid) < 0.97 * error(weights(), "nearest", grid)


def test_zero_points_lower_the_error() -> None:
    assert error(weights(), "nearest", Grid(4, symmetric=False)) < error(weights(), "nearest", Grid(4, symmetric=True))


def test_option_types_list_every_quantiser_and_lowering() -> None:
    assert set(get_args(Quantiser)) == set(names())
    assert set(get_args(Attention)) == {"auto", GROWING, *attention.names()}
