"""Progress of the stages of an export. The command line shows it; a library caller may pass nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, TypeAlias

Unit: TypeAlias = Literal["bytes", "layers", "tokens", "weights"]
"""Unit of the work of a stage."""


class Stage(Protocol):
    """Progress of one long part of an export."""

    def advance(self, amount: int) -> None:
        """`amount` more units are done."""


class Progress(Protocol):
    """Receives the start and end of every stage."""

    def start(self, title: str, total: int | None, unit: Unit) -> Stage:
        """Show a new stage; `total` is None when the amount of work is unknown."""

    def finish(self, stage: Stage, seconds: float) -> None:
        """The stage ended after `seconds`."""


class Silent:
    """A `Progress` and a `Stage` that show nothing; the default of library calls."""

    def start(self, title: str, total: int | None, unit: Unit) -> Stage:
        """Itself."""
        return self

    def advance(self, amount: int) -> None:
        """Ignored."""

    def finish(self, stage: Stage, seconds: float) -> None:
        """Ignored."""


@contextmanager
def stage(
    progress: Progress,
    title: str,
    seconds: dict[str, float],
    total: int | None = None,
    unit: Unit = "bytes",
    *,
    of: str = "",
) -> Iterator[Stage]:
    """Run a stage, show it, and add its seconds to those of `title`. `of`: appended to the title that is shown."""
    started = time.perf_counter()
    current = progress.start(f"{title} {of}" if of else title, total, unit)
    try:
        yield current
    finally:
        took = time.perf_counter() - started
        seconds[title] = seconds.get(title, 0.0) + took
        progress.finish(current, took)
