"""How lines of ONNX Runtime's log are read: what a provider's file says of its own."""

from __future__ import annotations

from dataclasses import dataclass

from partita.observations.codes import PROVIDER_CODES, ReasonCode


@dataclass(frozen=True, slots=True)
class LogPattern:
    """How a line of ONNX Runtime's log gives a reason away."""

    reason: ReasonCode
    pattern: str
    """Regular expression, searched for in one line; named groups `node`, `op` and `why` where the line has them."""

    def __post_init__(self) -> None:
        if self.reason in PROVIDER_CODES and "(?P<node>" in self.pattern:
            raise ValueError(f"{self.reason} is about a provider, and {self.pattern!r} about a node")

    vague: bool = False
    """The line says that the provider turned the node down for this, and not what of the node it is."""
