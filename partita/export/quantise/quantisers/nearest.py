"""Round to nearest: equal steps over the range of a block.

With a zero point the range spans the minimum, the maximum and 0. Without one it is symmetric, and the weight of largest
magnitude is exact (as in ONNX Runtime, and in llama.cpp's Q4_0).
"""

from __future__ import annotations

import torch

from partita.export.quantise.quantisers import Grid, Quantised, Quantiser, finished, not_zero, steps


def range_parameters(weights: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [R, M, 1] float32 that cover the whole range of every block."""
    if grid.symmetric:
        largest = weights.gather(-1, weights.abs().argmax(-1, keepdim=True))
        return not_zero(largest / -grid.middle), torch.full_like(largest, grid.middle)
    low, high = weights.amin(-1, keepdim=True).clamp_(max=0), weights.amax(-1, keepdim=True).clamp_(min=0)
    scales = not_zero((high - low) / grid.top)
    return scales, (-low / scales).round_().clamp_(0, grid.top)


def _quantise(weights: torch.Tensor, grid: Grid) -> Quantised:
    scales, zeros = range_parameters(weights, grid)
    return finished(steps(weights, scales, zeros, grid), scales, zeros)


QUANTISER = Quantiser("nearest", "round to nearest over the range of each block", _quantise)
