"""GPTQ: a column after the other is rounded, and those that follow make up for the error on a text.

With x the inputs of a product, H the mean of x x^T and W [N, K] its weights, the error of the outputs is
tr (W - Q) H (W - Q)^T. When column j is rounded, the weights after it that make this least are W[:, k] - e L[j, k] with
e = (W[:, j] - Q[:, j]) / L[j, j], where L is the upper Cholesky factor of H^-1 (Frantar et al., GPTQ, arXiv 2210.17323,
equations 2 and 3 and section 3.3). Within a block of columns that is done at once, after it for all that follow.

Scale and zero point of a block are found when its turn comes, on the weights as they are by then, by the search of
`refit` with an error that counts as much as the equations make it cost: 1 / L[j, j]^2. Columns are taken in their
order, because g_idx, which another order would need, leaves ONNX Runtime's fast kernels. Zero points are integers, for
the same reason.
"""

from __future__ import annotations

import torch

from partita.export.quantise.rounders import refit
from partita.export.quantise.rounders.base import Grid, Quantised, Quantiser, Round, finished, steps

DAMPING = 0.01
"""Of the mean of H's diagonal, added to it: directions that the text hardly has count a little all the same."""


def _calibrate(moments: torch.Tensor, grid: Grid, size: int) -> Round:
    filled = -len(moments) % size
    factor = _factor(torch.nn.functional.pad(moments, (0, filled, 0, filled)))

    def round_rows(weights: torch.Tensor) -> Quantised:
        return _round(torch.nn.functional.pad(weights, (0, filled)).T.contiguous(), factor, grid, size)

    return round_rows


def _round(left: torch.Tensor, factor: torch.Tensor, grid: Grid, size: int) -> Quantised:
    """`left`: weights [K, R] that are yet to be rounded, which are changed."""
    count, rows = len(left) // size, left.shape[1]
    found = torch.empty_like(left)
    scales, zeros = torch.empty(count, rows), torch.empty(count, rows)
    for index in range(count):
        start, end = index * size, (index + 1) * size
        block, inside = left[start:end], factor[start:end, start:end]
        _, scale, zero = refit.fit(block.T.unsqueeze(1).contiguous(), grid, inside.diagonal() ** -2)
        scales[index], zeros[index] = scale.flatten(), zero.flatten()
        errors = torch.empty_like(block)
        for j in range(size):
            now = steps(block[j], scales[index], zeros[index], grid)
            errors[j] = (block[j] - scales[index] * now) / inside[j, j]
            block[j + 1 :].addr_(inside[j, j + 1 :], errors[j], alpha=-1)
            found[start + j] = now
        left[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    blocks = found.T.reshape(rows, count, size)
    return finished(blocks, scales.T.unsqueeze(-1), zeros.T.unsqueeze(-1))


def _factor(moments: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of H, damped, float32 [K, K].

    An input that is 0 in the whole text, as those that fill up the last block, is tied to no other. In float64: the
    least eigenvalues of H are far below float32's share of the largest.
    """
    damped = moments.to(torch.float64, copy=True)
    diagonal = damped.diagonal()
    share = DAMPING * diagonal.mean()
    diagonal[diagonal == 0] = 1.0
    diagonal += share
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _quantise(weights: torch.Tensor, grid: Grid) -> Quantised:
    """What no text reaches, as an embedding of its own, is fitted without one."""
    return finished(*refit.fit(weights, grid))


QUANTISER = Quantiser(
    "gptq", "later weights make up for the rounding of earlier ones, on a text", _quantise, _calibrate
)
