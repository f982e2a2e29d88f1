"""What every stage of an export is handed: what was asked for, how far it is, and what there is to tell."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from partita.export.asked import Asked
from partita.export.options import ExportOptions
from partita.export.progress import Progress
from partita.export.target import TakesEach
from partita.package.folder import Graph

ReadFolder = Callable[[Path, int, int], Graph]
"""Reads the graphs of another exporter: (folder, batch size, max length) -> how they are run. Raises PackageError."""


@dataclass(slots=True)
class Work:
    """State handed from stage to stage."""

    options: ExportOptions
    progress: Progress
    folder: Path
    """Where the package is made."""
    asked: Asked = field(default_factory=dict)
    """What the manifest keeps of the options."""
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    takes: TakesEach | None = None
    """Asks the CPU provider about nodes that a pass would write, where there is no target; None: nobody is asked."""
    read_folder: ReadFolder | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)
    """Ends with the export: what has to last until everything is written, and not longer."""

    @property
    def scratch(self) -> Path:
        """Where large things that are not part of the package lie while they are needed: beside it."""
        return self.folder.parent


def tell(work: Work, note: str) -> None:
    """Add a note for the user, once."""
    if note not in work.notes:
        work.notes.append(note)
