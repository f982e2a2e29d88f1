"""GPTQ: results match the definition, and output errors are lower than without calibration."""

from __future__ import annotations

import pytest
import torch

from partita.export.quantise.quantisers import Grid, Quantised, quantiser
from partita.export.quantise.quantisers.gptq import DAMPING
from partita.export.quantise.quantisers.refit import fit

GRID = Grid(4, symmetric=False)


def activations(tokens: int, width: int) -> torch.Tensor:
    """[T, K] that mostly lie in a quarter of the directions, and of unequal size, as those of a model do."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(width // 4, width, generator=generator)
    sizes = torch.rand(width, generator=generator) + 0.2
    mixed = torch.randn(tokens, width // 4, generator=generator) @ mixing
    return (mixed + 0.5 * torch.randn(tokens, width, generator=generator)) * sizes


def weights(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 0.02


def restored(found: Quantised, width: int) -> torch.Tensor:
    """What the integers stand for, [R, K]."""
    values = (found.integers.float() - found.zeros.float()[..., None]) * found.scales[..., None]
    return values.flatten(1)[:, :width]


def rounded(weight: torch.Tensor, inputs: torch.Tensor, grid: Grid = GRID, size: int = 32) -> Quantised:
    calibrate = quantiser("gptq").calibrate
    assert calibrate is not None
    return calibrate(inputs.T @ inputs / len(inputs), grid, size)(weight)


def output_error(values: torch.Tensor, weight: torch.Tensor, inputs: torch.Tensor) -> float:
    """Relative, of the products."""
    return float((inputs @ (values - weight).T).norm() / (inputs @ weight.T).norm())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_output_error_is_lower_than_uncalibrated(bits: int, symmetric: bool) -> None:
    inputs, weight, grid = activations(1024, 128), weights(48, 128), Grid(bits, symmetric)
    ours = output_error(restored(rounded(weight, inputs, grid), 128), weight, inputs)
    for name in ("nearest", "refit"):
        free = restored(quantiser(name).quantise(weight.reshape(48, 4, 32), grid), 128)
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
    inputs, weight, grid = activations(512, 48), weights(16, 48), Grid(4, symmetric)
    found, expected = restored(rounded(weight, inputs, grid, 16), 48), by_definition(weight, inputs, grid, 16)
    # A weight in the middle between two steps may go to either, and moves those after it in its row.
    same = (found - expected).abs().amax(1) < 1e-5
    assert float(same.float().mean()) > 0.8
    assert output_error(found, weight, inputs) == pytest.approx(output_error(expected, weight, inputs), rel=0.05)


def test_rows_are_independent_and_results_deterministic() -> None:
    inputs, weight = activations(512, 64), weights(12, 64)
    whole = rounded(weight, inputs)
    again, part = rounded(weight, inputs), rounded(weight[5:9], inputs)
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
    assert torch.allclose(restored(whole, 64)[5:9], restored(part, 64), atol=1e-6)


def test_zero_input_channels_give_finite_accurate_weights() -> None:
    """The text has fewer tokens than the layer has inputs; results stay finite."""
    inputs, weight = activations(20, 64), weights(8, 64)
    inputs[:, 10] = 0
    found = restored(rounded(weight, inputs), 64)
    assert torch.isfinite(found).all()
    assert float((found[:, 10] - weight[:, 10]).abs().max()) < 0.01
    assert output_error(found, weight, inputs) < 0.1


def test_incomplete_last_block_is_padded() -> None:
    inputs, weight = activations(256, 40), weights(8, 40)
    found = rounded(weight, inputs)
    assert found.integers.shape == (8, 2, 32) and found.scales.shape == (8, 2)
    assert output_error(restored(found, 40), weight, inputs) < 0.1
