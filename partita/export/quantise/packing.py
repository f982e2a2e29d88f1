"""How a weight is quantised: the integers that it may become, its blocks, and what finds them."""

from __future__ import annotations

from dataclasses import dataclass

from partita.export.quantise.rounders import Grid


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are quantised, and with which quantiser."""

    grid: Grid
    block_size: int
    """Weights of a row that share a scale and a zero point."""
    quantiser: str

    @property
    def name(self) -> str:
        """What it is called where there is room for a word: int4."""
        return f"int{self.grid.bits}"
