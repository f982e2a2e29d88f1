"""The state of an export: options, notes, and the progress of its stages, which a library caller need not watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from partita.export.options import Asked, ExportOptions
    from partita.export.target import NodeSupport
    from partita.export.verify.quality import SourceLogits
    from partita.package.folder import Graph

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


class SilentStage:
    """Does nothing; for callers that pass no `Progress`."""

    def advance(self, amount: int) -> None:
        """Ignored."""


class Silent:
    """Does nothing; the default of library calls."""

    def start(self, title: str, total: int | None, unit: Unit) -> Stage:
        """A stage that does nothing."""
        return SilentStage()

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
    import time

    started = time.perf_counter()
    current = progress.start(f"{title} {of}" if of else title, total, unit)
    try:
        yield current
    finally:
        took = time.perf_counter() - started
        seconds[title] = seconds.get(title, 0.0) + took
        progress.finish(current, took)


ReadFolder: TypeAlias = "Callable[[Path, int, int], Graph]"
"""Reads the graphs of another exporter: (folder, batch size, max length) -> graph record. Raises PackageError."""


@dataclass(slots=True)
class Work:
    """State shared by all stages."""

    options: ExportOptions
    progress: Progress
    folder: Path
    """The folder in which the package is made."""
    recorded_options: Asked = field(default_factory=dict)
    """The options to record in the manifest."""
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    supports: NodeSupport | None = None
    """Probes the CPU provider with nodes of passes, where there is no target; None: no probes."""
    read_folder: ReadFolder | None = None
    source_logits: SourceLogits | None = None
    """Logits of the source model for the quality text, for all attempts."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    """Ends with the export: resources needed until everything is written."""

    @property
    def scratch(self) -> Path:
        """A folder on the package's disk for large temporary files."""
        return self.folder.parent


def add_note(work: Work, note: str) -> None:
    """Add a note for the user, once."""
    if note not in work.notes:
        work.notes.append(note)
