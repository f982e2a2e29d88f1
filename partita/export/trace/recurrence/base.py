"""What a recurrence is: transformers' names of a function, and what is written in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partita.export.trace.operators import Form

Function = Callable[..., Any]
"""With the arguments and results of the function that it replaces."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A function of transformers that goes over tokens one by one, and what takes its place in a trace."""

    functions: tuple[str, ...]
    """What transformers calls it."""
    contrib: Function
    """For any number of tokens, in ONNX Runtime's own operators."""
    standard: Function
    """For a fixed number of tokens, in standard operators."""
    reads_state: bool = False
    """It goes on from the state that the layer has read last: the model's own code is then shown none, and takes its
    path for several tokens always.
    """

    def written(self, form: Form) -> Function:
        """What takes the place of the function."""
        return self.contrib if form == "contrib" else self.standard
