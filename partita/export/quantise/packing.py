"""Quantisation parameters of a weight."""

from __future__ import annotations

from dataclasses import dataclass

from partita.export.quantise.rounders import Grid


@dataclass(frozen=True, slots=True)
class Packing:
    """The grid, block size and quantiser of a weight."""

    grid: Grid
    block_size: int
    """Weights of a row that share a scale and a zero point."""
    quantiser: str

    @property
    def name(self) -> str:
        """The short name, e.g. int4."""
        return f"int{self.grid.bits}"
