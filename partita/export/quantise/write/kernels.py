"""The kernels of a provider for quantised weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Kernels:
    """Supported variants; the defaults are those of the CPU provider, which verifies every package."""

    symmetric: bool = False
    accuracy_level: int = 4
    bias: bool = True
    gather: bool = True
    experts: bool = True
    """It has the form's operator on stacks of experts."""
    block_sizes: Mapping[int, int] = field(default_factory=lambda: {4: 64, 8: 128})
    """Bits -> default block size."""
    smaller: tuple[int, ...] = (16, 32, 64)
    """Supported block sizes for weights whose rows the chosen size does not divide."""
    folds: bool = False
    """It is a compiler that fuses DequantizeLinear: forms in standard operators are probed first."""
    activations: str = "fp32"
    """The default of --activations for quantised products."""
