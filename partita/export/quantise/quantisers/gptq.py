"""GPTQ: quantise column by column, and let later columns compensate the error on a text.

With x the inputs of a product, H the mean of x x^T and W [N, K] its weights, the error of the outputs is tr (W - Q) H
(W - Q)^T. When column j is quantised, the weights after it that minimise this are W[:, k] - e L[j, k] with e = (W[:, j]
- Q[:, j]) / L[j, j], where L is the upper Cholesky factor of H^-1 (Frantar et al., GPTQ, arXiv 2210.17323, equations 2
and 3 and section 3.3). Columns of a block are updated at once, later blocks after it.

Scale and zero point of a block are chosen on the updated weights, by the search of `refit` weighted with 1 / L[j, j]^2.
Columns keep their order and zero points are integers, as ONNX Runtime's fast kernels require.
"""

from __future__ import annotations

import torch

from partita.export.quantise.quantisers import Grid, Quantised, Quantiser, Round, columns, in_blocks, refit, steps

DAMPING = 0.01
"""Fraction of the mean of H's diagonal, added to it, so that directions that are rare in the text keep some weight."""


def _calibrate(moments: torch.Tensor, grid: Grid, size: int) -> Round:
    filled = -len(moments) % size
    factor = _factor(torch.nn.functional.pad(moments, (0, filled, 0, filled)))

    def round_rows(weights: torch.Tensor) -> Quantised:
        return _round(torch.nn.functional.pad(weights, (0, filled)).T.contiguous(), factor, grid, size)

    return round_rows


def _round(weights: torch.Tensor, factor: torch.Tensor, grid: Grid, size: int) -> Quantised:
    """Quantise. `weights`: [K, R], changed in place."""
    count, rows = len(weights) // size, weights.shape[1]
    found = torch.empty_like(weights)
    scales, zeros = torch.empty(count, rows), torch.empty(count, rows)
    for index in range(count):
        start, end = index * size, (index + 1) * size
        block, own_factor = weights[start:end], factor[start:end, start:end]
        _, scales[index], zeros[index] = refit.fit(block, grid, own_factor.diagonal() ** -2)
        errors = torch.empty_like(block)
        for j in range(size):
            now = steps(block[j], scales[index], zeros[index], grid)
            errors[j] = (block[j] - scales[index] * now) / own_factor[j, j]
            block[j + 1 :].addr_(own_factor[j, j + 1 :], errors[j], alpha=-1)
            found[start + j] = now
        weights[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return in_blocks(columns(found.T.reshape(rows, count, size)), scales.T.flatten(), zeros.T.flatten(), rows)


def _factor(moments: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of H, damped, float32 [K, K]."""
    damped = moments.to(torch.float64, copy=True)  # the smallest eigenvalues of H are below float32 precision
    diagonal = damped.diagonal()
    share = DAMPING * diagonal.mean()
    diagonal[diagonal == 0] = 1.0
    diagonal += share
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _quantise(weights: torch.Tensor, grid: Grid) -> Quantised:
    """Weights that the text does not reach are quantised without it."""
    return in_blocks(*refit.fit(columns(weights), grid), len(weights))


QUANTISER = Quantiser(_quantise, _calibrate)
