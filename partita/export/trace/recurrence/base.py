"""The replacement of a transformers function for a recurrence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partita.export.trace.operators import Form

Function = Callable[..., Any]
"""A function with the arguments and results of the replaced one."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A transformers function that loops over tokens, and its replacements in a trace."""

    functions: tuple[str, ...]
    """Its names in transformers."""
    contrib: Function
    """For any number of tokens, in ONNX Runtime's operators."""
    standard: Function
    """For a fixed number of tokens, in standard operators."""
    reads_state: bool = False
    """It reads the layer's last state itself: the model gets no state, and always takes its code path for several
    tokens."""

    def written(self, form: Form) -> Function:
        """The replacement in this form."""
        return self.contrib if form == "contrib" else self.standard
