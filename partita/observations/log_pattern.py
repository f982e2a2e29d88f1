"""Patterns of ONNX Runtime's log lines that name a reason."""

from __future__ import annotations

from dataclasses import dataclass

from partita.observations.codes import PROVIDER_CODES, ReasonCode


@dataclass(frozen=True, slots=True)
class LogPattern:
    """A log line of ONNX Runtime that names a reason."""

    reason: ReasonCode
    pattern: str
    """Regular expression to search in one line, with optional groups `node`, `op` and `why`."""

    def __post_init__(self) -> None:
        if self.reason in PROVIDER_CODES and "(?P<node>" in self.pattern:
            raise ValueError(f"{self.reason} is a provider-level reason, but {self.pattern!r} matches a node")

    vague: bool = False
    """The line names the reason, but not the property of the node that is unsupported."""
