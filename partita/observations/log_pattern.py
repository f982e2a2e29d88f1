"""How lines of ONNX Runtime's log are read: what a provider's file says of its own."""

from __future__ import annotations

from dataclasses import dataclass

from partita.observations.codes import ReasonCode


@dataclass(frozen=True, slots=True)
class LogPattern:
    """How a line of ONNX Runtime's log gives a reason away."""

    reason: ReasonCode
    pattern: str
    """Regular expression, searched for in one line; named groups `node`, `op` and `why` where the line has them."""
