"""How packed weights are written for a provider: what is known of it, and what asking it has shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a provider takes; the defaults are those of the CPU provider, where every package is verified."""

    symmetric: bool = False
    accuracy_level: int = 4
    bias: bool = True
    gather: bool = True
    experts: bool = True
    """It has the operator on stacks of experts that the form writes."""
    block_sizes: Mapping[int, int] = field(default_factory=lambda: {4: 64, 8: 128})
    """The default, by bits."""
    smaller: tuple[int, ...] = (16, 32, 64)
    """Sizes of blocks that it takes for weights whose rows the size that is wanted does not divide."""
    folds: bool = False
    """It is a compiler, which folds DequantizeLinear: packed weights in standard operators are asked about first."""
    activations: str = "fp32"
    """What packed products are computed with, as --activations has it, where nobody says otherwise."""
