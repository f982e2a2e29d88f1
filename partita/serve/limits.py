"""How much the server takes on at once, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from partita.errors import UsageError
from partita.spelling import spelled

MAX_SECONDS = 7 * 24 * 3600.0
MAX_COUNT = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a client can ask of the server's memory and time. Raises UsageError for a limit that makes no sense."""

    body_bytes: int = 4 << 20
    """Of a request."""
    queue: int = 256
    """Prompts of each model that wait for a free row."""
    seconds: float = 600.0
    """From the arrival of a request to the end of its answer, waiting included."""
    requests: int = 1024
    """Open at once, those included whose answer is only still being read."""
    read_seconds: float = 30.0
    """Until a request has arrived whole."""
    drain_seconds: float | None = None
    """For the open requests to end, once the server is told to; None: as long as they may take."""

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("max_body", self.body_bytes, 1, 1 << 40),
            ("max_queue", self.queue, 0, MAX_COUNT),
            ("timeout", self.seconds, 0.001, MAX_SECONDS),
            ("max_requests", self.requests, 1, MAX_COUNT),
            ("drain_timeout", self.drain_seconds, 0, MAX_SECONDS),
        ):
            if value is not None and not least <= value <= most:
                raise UsageError(f"{spelled(name)} is {value:g}; it must be between {least:g} and {most:,g}")
