"""What one graph is made for: its fixed sizes, its operator set, and how its experts and recurrences are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partita.export.trace.operators import Form


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """The fixed sizes of one graph, and the operators that it may have besides those of its attention."""

    batch: int
    max_length: int
    sequence_length: int | None
    """S, or None to leave it symbolic; a fixed S also fixes K to 1."""
    opset: int
    form: Form
    """How experts and recurrences are written."""
    rolls: bool = False
    """Layers with a window cache that alone, where the lowering's operator keeps such a cache."""

    @property
    def tokens(self) -> int | None:
        """Tokens of a step over all rows, when they are fixed."""
        return None if self.sequence_length is None else self.batch * self.sequence_length
