"""Quantisers: integer range, error bounds and exact values on the grid; GPTQ matches its definition."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from partita.export.quantise import DEFAULT, Grid
from partita.export.quantise.rounding import DAMPING, QUANTISERS, fit, gptq
from partita.export.trace import attention
from partita.export.trace.attention import GROWING
from partita.export.weights import Quantised
from partita.options.export import Attention, Quantiser

GRIDS = [Grid(bits, symmetric) for bits in (4, 8) for symmetric in (False, True)]


def heavy_tailed(rows: int = 16, count: int = 6, size: int = 32) -> torch.Tensor:
    """[R, M, B] with the heavy tails that trained weights have."""
    generator = torch.Generator().manual_seed(0)
    chi = torch.randn(6, rows, count, size, generator=generator).square().mean(0)
    return torch.randn(rows, count, size, generator=generator) / chi.sqrt() * 0.02


def values(found: Quantised) -> torch.Tensor:
    """Dequantised blocks [R, M, B]."""
    return (found.integers.float() - found.zeros.float()[..., None]) * found.scales[..., None]


def error(blocks: torch.Tensor, name: str, grid: Grid) -> float:
    """Relative to the weights."""
    return float((values(QUANTISERS[name](blocks, grid)) - blocks).norm() / blocks.norm())


@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_integers_are_in_range_and_error_is_bounded(name: str, grid: Grid) -> None:
    """Values on the grid are exact, as is a block of zeros."""
    blocks = heavy_tailed()
    found = QUANTISERS[name](blocks, grid)
    assert found.integers.dtype == found.zeros.dtype == torch.uint8 and found.scales.dtype == torch.float32
    assert found.integers.shape == blocks.shape and found.scales.shape == found.zeros.shape == blocks.shape[:2]
    assert int(found.integers.max()) <= grid.top and int(found.zeros.max()) <= grid.top
    if grid.symmetric:
        assert (found.zeros == grid.middle).all()
    assert error(blocks, name, grid) < (0.12 if grid.bits == 4 else 0.01)
    steps = torch.linspace(0, grid.top, 32).round() - grid.middle
    exact = torch.stack([steps * 0.125, torch.zeros(32)])[None]
    assert torch.allclose(values(QUANTISERS[name](exact, grid)), exact, atol=1e-6 * float(exact.abs().max()))


def test_refit_and_zero_points_lower_the_error() -> None:
    assert DEFAULT == "refit"
    blocks, pair = heavy_tailed(), (Grid(4, symmetric=False), Grid(4, symmetric=True))
    for grid in pair:
        assert error(blocks, "refit", grid) < 0.97 * error(blocks, "nearest", grid)
    assert error(blocks, "nearest", pair[0]) < error(blocks, "nearest", pair[1])


def test_option_types_list_every_quantiser_and_lowering() -> None:
    assert set(get_args(Quantiser)) == set(QUANTISERS)
    assert set(get_args(Attention)) == {"auto", GROWING, *attention.NAMES}


def activations(tokens: int, width: int) -> torch.Tensor:
    """[T, K] that mostly lie in a quarter of the directions, and of unequal size, as those of a model do."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(width // 4, width, generator=generator)
    sizes = torch.rand(width, generator=generator) + 0.2
    mixed = torch.randn(tokens, width // 4, generator=generator) @ mixing
    return (mixed + 0.5 * torch.randn(tokens, width, generator=generator)) * sizes


def matrix(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 0.02


def calibrated(weight: torch.Tensor, inputs: torch.Tensor, grid: Grid = GRIDS[0], size: int = 32) -> torch.Tensor:
    """Dequantised GPTQ weights [R, K]."""
    found = gptq(inputs.T @ inputs / len(inputs), grid, size)(weight)
    assert found.integers.shape == (len(weight), -(-weight.shape[1] // size), size), "the last block is padded"
    return values(found).flatten(1)[:, : weight.shape[1]]


def output_error(found: torch.Tensor, weight: torch.Tensor, inputs: torch.Tensor) -> float:
    """Relative error of the products."""
    return float((inputs @ (found - weight).T).norm() / (inputs @ weight.T).norm())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gptq_output_error_is_lower_than_uncalibrated(grid: Grid) -> None:
    inputs, weight = activations(1024, 128), matrix(48, 128)
    ours = output_error(calibrated(weight, inputs, grid), weight, inputs)
    for name in ("nearest", "refit"):
        free = values(QUANTISERS[name](weight.reshape(48, 4, 32), grid)).flatten(1)
        assert ours < 0.7 * output_error(free, weight, inputs), name


def by_definition(weight: torch.Tensor, inputs: torch.Tensor, grid: Grid, size: int) -> torch.Tensor:
    """Optimal brain surgery, a column at a time, the inverse of what is left computed anew for every column."""
    hessian = (inputs.T @ inputs / len(inputs)).double()
    hessian += DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    left, result = weight.double().clone(), torch.zeros_like(weight).double()
    costs = torch.stack([torch.linalg.inv(hessian[j:, j:])[0, 0].reciprocal() for j in range(len(hessian))])
    for j in range(weight.shape[1]):
        if j % size == 0:
            _, scale, zero = fit(left[:, j : j + size].T.float(), grid, costs[j : j + size].float())
            scale, zero = scale.double(), zero.double()
        steps = (left[:, j] / scale).round().maximum(-zero).minimum(grid.top - zero)
        result[:, j] = steps * scale
        inverse = torch.linalg.inv(hessian[j:, j:])
        left[:, j:] -= torch.outer((left[:, j] - result[:, j]) / inverse[0, 0], inverse[0])
    return result.float()


@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_matches_definition(symmetric: bool) -> None:
    inputs, weight, grid = activations(512, 48), matrix(16, 48), Grid(4, symmetric)
    found, expected = calibrated(weight, inputs, grid, 16), by_definition(weight, inputs, grid, 16)
    # A weight in the middle between two steps may go to either, and moves those after it in its row.
    same = (found - expected).abs().amax(1) < 1e-5
    assert float(same.float().mean()) > 0.8
    assert output_error(found, weight, inputs) == pytest.approx(output_error(expected, weight, inputs), rel=0.05)


def test_gptq_is_finite_with_few_tokens_zero_inputs_and_a_padded_block() -> None:
    inputs, weight = activations(20, 72), matrix(8, 72)
    inputs[:, 10] = 0
    found = calibrated(weight, inputs)
    assert torch.isfinite(found).all()
    assert float((found[:, 10] - weight[:, 10]).abs().max()) < 0.01
    assert output_error(found, weight, inputs) < 0.1
