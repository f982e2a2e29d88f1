"""`partita inspect`: contents of a package or folder, and differences from another."""

from __future__ import annotations

from pathlib import Path

from partita.commands.outputs import prepare, requested_view
from partita.foreign.folder import Choice
from partita.library.inspecting import choice_of_other, files_of, run_inspection
from partita.options.inspection import InspectCommand

VIEWS = "partita.inspection.document"
DIFF_VIEWS = "partita.compare.document"


def run(options: InspectCommand) -> None:
    """Inspect and show. Problems of the folder are findings, not errors. Raises UsageError, PackageError."""
    path, view = Path(options.package), requested_view(options)
    reads = (*files_of(path), *Choice.of(options).input_paths, *choice_of_other(options).input_paths)
    if options.against is not None:
        reads = (*reads, *files_of(Path(options.against)))
    showing = prepare(view, VIEWS if options.against is None else DIFF_VIEWS, reads)
    showing.show(run_inspection(options))
