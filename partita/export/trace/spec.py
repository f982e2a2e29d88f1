"""The sizes and operator choices of one graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partita.export.trace.operators import Form


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """The fixed sizes of one graph, and the form of its non-attention operators."""

    batch: int
    max_length: int
    sequence_length: int | None
    """S, or None for a symbolic size; a fixed S also fixes K to 1."""
    opset: int
    form: Form
    """The form of experts and recurrences."""
    rolls: bool = False
    """Layers with a window cache only the window, where the lowering supports it."""

    @property
    def tokens(self) -> int | None:
        """Tokens of a step over the batch, when they are fixed."""
        return None if self.sequence_length is None else self.batch * self.sequence_length
