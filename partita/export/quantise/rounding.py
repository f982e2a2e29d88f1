"""The quantisers. Zero points are integers, as ONNX Runtime's fast kernels require.

nearest: equal steps over the range of a block. With a zero point the range spans the minimum, the maximum and 0.
Without one it is symmetric, and the weight of largest magnitude is exact (as in ONNX Runtime, and in llama.cpp's Q4_0).

refit: try several ranges per block, each with its least-squares scale. A range that clips the largest weights has finer
steps for the others. For each range the weights are rounded to steps d; the scale with the least squared error is
s = <w, d> / <d, d>, and it explains <w, d>^2 / <d, d> of the block, so the range with the largest value is chosen.

gptq: quantise column by column, and let later columns compensate the error on a text. With x the inputs of a product, H
the mean of x x^T and W [N, K] its weights, the error of the outputs is tr (W - Q) H (W - Q)^T. When column j is
quantised, the weights after it that minimise this are W[:, k] - e L[j, k] with e = (W[:, j] - Q[:, j]) / L[j, j], where
L is the upper Cholesky factor of H^-1 (Frantar et al., GPTQ, arXiv 2210.17323, equations 2 and 3 and section 3.3).
Columns of a block are updated at once, later blocks after it. Scale and zero point of a block are chosen on the updated
weights, by `refit` weighted with 1 / L[j, j]^2. Weights that the text does not reach are quantised by `refit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from partita.export.quantise import Grid
from partita.export.weights import Quantised

SHARES = (0.8, 0.86, 0.91, 0.96, 1.0)
"""Tested fractions of the whole range. Eight fractions from 0.75 reduce the squared error by 0.1 to 0.3 % only."""
FINE = 8
"""From this number of bits, clipping costs more than finer steps save: only the whole range is refitted."""
LARGEST_EXACT = 1 << 24
"""Up to here float32 has every integer."""
DAMPING = 0.01
"""Fraction of the mean of H's diagonal, added to it, so that directions that are rare in the text keep some weight."""
Round = Callable[[torch.Tensor], Quantised]
"""Finite weights [R, K] float32 -> blocks along K, the last padded with zeros. Rows are independent."""


def _nearest(weights: torch.Tensor, grid: Grid) -> Quantised:
    blocks = _columns(weights)
    scales, zeros = _range_parameters(blocks, grid)
    return _in_blocks(_steps(blocks, scales, zeros, grid), scales, zeros, len(weights))


def _refit(weights: torch.Tensor, grid: Grid) -> Quantised:
    return _in_blocks(*fit(_columns(weights), grid), len(weights))


def fit(
    weights: torch.Tensor, grid: Grid, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps [B, P], scales and zero points [P] with the least squared error of `weights` [B, P] by `importance` [B]."""
    full, zeros = _range_parameters(weights, grid)
    best = torch.full_like(full, -1.0)
    scales, chosen, ranges = full, zeros, full
    middle = grid.top / 2 - zeros  # the middle of the range, in steps of the full scale
    now, products = torch.empty_like(weights), torch.empty_like(weights)  # memory of their own would be mapped anew
    for share in SHARES if grid.bits < FINE else (1.0,):
        tried = full * share
        shifted = zeros if grid.symmetric else (grid.top / 2 - middle / share).round_().clamp_(0, grid.top)
        _steps(weights, tried, shifted, grid, now)
        counted = now if importance is None else now * importance.unsqueeze(1)
        squares = torch.mul(now, counted, out=products)
        # a sum of small integers is exact in any order
        exact = importance is None and len(weights) * grid.top**2 < LARGEST_EXACT
        length = squares.sum(0) if exact else _column_sums(squares)
        along = _column_sums(torch.mul(weights, counted, out=products))
        fitted = torch.where(length > 0, along / length, 0.0)  # length 0: all steps are 0
        explained = along * fitted
        better = explained > best
        best = torch.where(better, explained, best)
        scales = torch.where(better, fitted, scales)
        ranges = torch.where(better, tried, ranges)
        chosen = torch.where(better, shifted, chosen)
    return _steps(weights, ranges, chosen, grid, now), _not_zero(scales), chosen


def gptq(moments: torch.Tensor, grid: Grid, size: int) -> Round:
    """A function for rows of a weight. `moments`: the mean of x x^T over the inputs of its product, float32 [K, K]."""
    filled = -len(moments) % size
    factor = _factor(torch.nn.functional.pad(moments, (0, filled, 0, filled)))

    def round_rows(weights: torch.Tensor) -> Quantised:
        return _round(torch.nn.functional.pad(weights, (0, filled)).T.contiguous(), factor, grid, size)

    return round_rows


def _round(weights: torch.Tensor, factor: torch.Tensor, grid: Grid, size: int) -> Quantised:
    """Quantise by GPTQ. `weights`: [K, R], changed in place."""
    count, rows = len(weights) // size, weights.shape[1]
    found = torch.empty_like(weights)
    scales, zeros = torch.empty(count, rows), torch.empty(count, rows)
    for index in range(count):
        start, end = index * size, (index + 1) * size
        block, own_factor = weights[start:end], factor[start:end, start:end]
        _, scales[index], zeros[index] = fit(block, grid, own_factor.diagonal() ** -2)
        errors = torch.empty_like(block)
        for j in range(size):
            now = _steps(block[j], scales[index], zeros[index], grid)
            errors[j] = (block[j] - scales[index] * now) / own_factor[j, j]
            block[j + 1 :].addr_(own_factor[j, j + 1 :], errors[j], alpha=-1)
            found[start + j] = now
        weights[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return _in_blocks(_columns(found.T.reshape(rows, count, size)), scales.T.flatten(), zeros.T.flatten(), rows)


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


def _range_parameters(weights: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [P] float32 that cover the whole range of every block, a column of `weights` [B, P]."""
    low, high = weights.amin(0), weights.amax(0)
    if grid.symmetric:
        largest = torch.where(high >= -low, high, low)
        return _not_zero(largest / -grid.middle), torch.full_like(largest, grid.middle)
    low.clamp_(max=0)
    scales = _not_zero((high.clamp_(min=0) - low) / grid.top)
    return scales, (-low / scales).round_().clamp_(0, grid.top)


def _columns(weights: torch.Tensor) -> torch.Tensor:
    """Blocks [R, M, B] as the columns of a matrix [B, R * M], so that what is done per block runs along memory."""
    return weights.flatten(0, 1).T.contiguous()


def _steps(
    weights: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: Grid, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The nearest integers minus the zero point, float32 [B, P]. `scales` (not 0) and `zeros`: [P] float32."""
    return torch.div(weights, scales, out=out).round_().clamp_(-zeros, grid.top - zeros)


def _column_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums [P] of the columns of [B, P], in its memory, by halves: the order of `torch.sum` depends on the columns."""
    while len(values) > 1:
        half = len(values) // 2
        values[:half] += values[half : 2 * half]
        if len(values) % 2:
            values[0] += values[-1]
        values = values[:half]
    return values[0].clone()


def _not_zero(scales: torch.Tensor) -> torch.Tensor:
    """Scales with 0 (blocks of zeros) replaced by 1."""
    return scales.masked_fill(scales == 0, 1.0)


def _in_blocks(found: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, rows: int) -> Quantised:
    """Steps [B, P], scales and zero points [P], all float32, as blocks of `rows` rows in their storage dtypes."""
    integers = (found + zeros).to(torch.uint8).T.contiguous()
    return Quantised(integers.view(rows, -1, len(found)), scales.view(rows, -1), zeros.to(torch.uint8).view(rows, -1))


QUANTISERS: Mapping[str, Callable[[torch.Tensor, Grid], Quantised]] = {
    "gptq": _refit,
    "nearest": _nearest,
    "refit": _refit,
}
"""Name -> a function of finite weights [R, M, B] float32 that uses no text."""
