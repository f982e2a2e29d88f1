"""Round to nearest: equal steps over the range of a block.

With a zero point the range spans the minimum, the maximum and 0. Without one it is symmetric, and the weight of largest
magnitude is exact (as in ONNX Runtime, and in llama.cpp's Q4_0).
"""

from __future__ import annotations

import torch

from partita.export.quantise.quantisers import Grid, Quantised, Quantiser, columns, in_blocks, not_zero, steps


def range_parameters(weights: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [P] float32 that cover the whole range of every block, a column of `weights` [B, P]."""
    low, high = weights.amin(0), weights.amax(0)
    if grid.symmetric:
        largest = torch.where(high >= -low, high, low)
        return not_zero(largest / -grid.middle), torch.full_like(largest, grid.middle)
    low.clamp_(max=0)
    scales = not_zero((high.clamp_(min=0) - low) / grid.top)
    return scales, (-low / scales).round_().clamp_(0, grid.top)


def _quantise(weights: torch.Tensor, grid: Grid) -> Quantised:
    blocks = columns(weights)
    scales, zeros = range_parameters(blocks, grid)
    return in_blocks(steps(blocks, scales, zeros, grid), scales, zeros, len(weights))


QUANTISER = Quantiser(_quantise)
