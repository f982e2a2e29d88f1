"""Progress of long stages: the command line shows bars, a library caller may ignore it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Stage(Protocol):
    """Progress of one long part of an export, counted in bytes."""

    def advance(self, amount: int) -> None:
        """Report `amount` more bytes."""


class Progress(Protocol):
    """Receives the start and end of every stage."""

    def start(self, title: str, total_bytes: int | None) -> Stage:
        """Show a new stage; `total_bytes` is None when the size is not known."""

    def finish(self, stage: Stage, seconds: float) -> None:
        """The stage ended after `seconds`."""


class SilentStage:
    """Does nothing; for callers that pass no `Progress`."""

    def advance(self, amount: int) -> None:
        """Ignored."""


class Silent:
    """Does nothing; the default of library calls."""

    def start(self, title: str, total_bytes: int | None) -> Stage:
        """A stage that does nothing."""
        return SilentStage()

    def finish(self, stage: Stage, seconds: float) -> None:
        """Ignored."""


@contextmanager
def stage(
    progress: Progress, title: str, seconds: dict[str, float], total_bytes: int | None = None, *, of: str = ""
) -> Iterator[Stage]:
    """Run a stage, report it, and add its duration to `seconds[title]`. `of`: a detail for the shown title."""
    import time

    started = time.perf_counter()
    current = progress.start(f"{title} {of}" if of else title, total_bytes)
    try:
        yield current
    finally:
        took = time.perf_counter() - started
        seconds[title] = seconds.get(title, 0.0) + took
        progress.finish(current, took)
