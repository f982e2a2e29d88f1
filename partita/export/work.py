"""The state of an export: options, progress and notes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from partita.export.options import Asked, ExportOptions
from partita.export.progress import Progress
from partita.export.target import NodeSupport
from partita.package.folder import Graph

if TYPE_CHECKING:
    from partita.export.verify.quality import SourceLogits

ReadFolder = Callable[[Path, int, int], Graph]
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
