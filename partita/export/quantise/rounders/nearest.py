"""Round to nearest: the range of a block is cut into equal steps, and every weight goes to the nearest.

With a zero point the range is that from the least to the largest weight, and 0; without one it is as large to both
sides, and the weight that is largest in magnitude is met exactly (ONNX Runtime's own rule, and that of llama.cpp's
Q4_0).
"""

from __future__ import annotations

import torch

from partita.export.quantise.rounders.base import Grid, Quantised, Quantiser, finished, not_zero, steps


def ranged(weights: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [R, M, 1] float32 that cover the whole range of every block."""
    if grid.symmetric:
        largest = weights.gather(-1, weights.abs().argmax(-1, keepdim=True))
        return not_zero(largest / -grid.middle), torch.full_like(largest, grid.middle)
    low, high = weights.amin(-1, keepdim=True).clamp_(max=0), weights.amax(-1, keepdim=True).clamp_(min=0)
    scales = not_zero((high - low) / grid.top)
    return scales, (-low / scales).round_().clamp_(0, grid.top)


def _quantise(weights: torch.Tensor, grid: Grid) -> Quantised:
    scales, zeros = ranged(weights, grid)
    return finished(steps(weights, scales, zeros, grid), scales, zeros)


QUANTISER = Quantiser("nearest", "round to nearest over the range of each block", _quantise)
