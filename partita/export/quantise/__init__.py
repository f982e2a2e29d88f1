"""Records of quantised weights: blocks of a weight -> integers q, a scale s and a zero point z per block.

s * (q - z) is near the weight. `--keep MODULE=PRECISION` sets modules whose weights have another precision than the
package.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from partita.dtypes import EXACT, PRECISIONS
from partita.errors import UsageError

DEFAULT = "refit"
CALIBRATED = "gptq"
"""The quantiser with a calibration text."""


def without_text(name: str) -> str:
    """The quantiser for weights that the calibration text does not reach."""
    return DEFAULT if name == CALIBRATED else name


@dataclass(frozen=True, slots=True)
class Grid:
    """The integer range of a quantised weight."""

    bits: int
    symmetric: bool
    """The zero point is the middle of the range for every block; otherwise each block has an integer zero point."""

    @property
    def top(self) -> int:
        """The largest integer; the smallest is 0."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric weight: 8 of 0 .. 15."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True, slots=True)
class Packing:
    """The grid, block size and quantiser of a weight."""

    grid: Grid
    block_size: int
    """Weights of a row that share a scale and a zero point."""
    quantiser: str

    def blocks_in(self, width: int) -> int:
        """Blocks of a row of `width`; the last one may be padded."""
        return -(-width // self.block_size)

    @property
    def name(self) -> str:
        """The short name, e.g. int4."""
        return f"int{self.grid.bits}"


@dataclass(frozen=True, slots=True)
class Keep:
    """One `--keep` setting."""

    pattern: str
    """Consecutive names in a module's path: `lm_head`, `layers.0`, `mlp.down_proj`."""
    precision: str

    @property
    def bits(self) -> int | None:
        """None: the weights are not quantised."""
        return PRECISIONS[self.precision].bits

    @property
    def stored(self) -> str | None:
        """The 16-bit dtype in which the weights are stored, with other activations; None for other precisions."""
        precision = PRECISIONS[self.precision]
        return precision.dtype if precision.bits is None and precision is not EXACT else None

    def fits(self, module: str) -> bool:
        """Whether it matches `module` or a parent. `layers.1` does not match `layers.10`."""
        return f".{self.pattern}." in f".{module}."


def read_keep(pairs: Sequence[tuple[str, str]], precision: str, dtype: str) -> tuple[Keep, ...]:
    """Parse the settings, as far as no model is needed. `dtype`: of the activations. Raises UsageError."""
    if pairs and PRECISIONS[precision].bits is None:
        raise UsageError(f"`keep` applies only to quantised weights; add `precision=int4` or int8 (it is {precision})")
    names = [name for name, each in PRECISIONS.items() if each.bits is not None or dtype in (EXACT.dtype, each.dtype)]
    for pattern, precision_name in pairs:
        if precision_name not in names:
            raise UsageError(f"`keep={pattern}={precision_name}`: choose one of {', '.join(names)}")
    return tuple(Keep(pattern, precision_name) for pattern, precision_name in pairs)


def paths(parameters: Sequence[str]) -> tuple[str, ...]:
    """Additional names of a weight: modules of joined parameters, and parameters such as stacks of experts."""
    # the only weight of a module may be shared with another module
    stacks = [name for name in parameters if not name.endswith(".weight")]
    return tuple(sorted(name.removesuffix(".weight") for name in (parameters if len(parameters) > 1 else stacks)))


def check_modules(keep: Sequence[Keep], modules: Collection[str]) -> None:
    """Raise UsageError for a pattern that matches no module, with the most similar name."""
    for each in keep:
        if any(each.fits(module) for module in modules):
            continue
        tails = {".".join(parts[i:]) for m in modules if (parts := m.split(".")) for i in range(len(parts))}
        near = difflib.get_close_matches(each.pattern, sorted(tails), n=1, cutoff=0.5)
        hint = f"; {near[0]} is one" if near else f"; one of its modules is {max(modules, key=len, default='none')}"
        raise UsageError(f"`keep={each.pattern}={each.precision}`: the model has no such module{hint}")
