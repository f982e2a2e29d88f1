"""What the workers of a run say of themselves, in an actor beside the driver: it outlives every worker."""

from __future__ import annotations

from typing import Any


class Ledger:
    """Notes by worker, as plain data. Its methods are called from other processes."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[str, Any]] = {}
        self._failed: dict[str, Any] | None = None
        self._begun: dict[str, int] = {}

    def joined(self, worker: str, fact: dict[str, Any]) -> None:
        """A worker has loaded its package."""
        self._workers[worker] = {**fact, "blocks": 0, "rows": 0, "tokens": 0, "busy_seconds": 0.0}

    def did(self, worker: str, rows: int, tokens: int, busy_seconds: float) -> None:
        """A worker has answered a block; `busy_seconds` since its first one began."""
        known = self._workers[worker]
        known["blocks"] += 1
        known["rows"] += rows
        known["tokens"] += tokens
        known["busy_seconds"] = max(known["busy_seconds"], busy_seconds)

    def began(self, what: str) -> int:
        """A block, or a row alone, is begun; how often it was before and did not end."""
        before = self._begun.get(what, 0)
        self._begun[what] = before + 1
        return before

    def ended(self, what: str) -> None:
        """It has its answers."""
        self._begun.pop(what, None)

    def failed(self, told: dict[str, Any]) -> None:
        """A worker cannot go on: the error as data, the first one of all."""
        self._failed = self._failed or told

    def read(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """What is known of every worker, in the order in which they joined; and the error, if there was one."""
        return list(self._workers.values()), self._failed
