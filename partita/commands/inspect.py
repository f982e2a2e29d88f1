"""`partita inspect`: what a package or folder holds; and what is different in another one."""

from __future__ import annotations

from pathlib import Path

from partita.commands.showing import Asked, prepare
from partita.library.inspecting import files_of, read

VIEWS = "partita.inspection.views"
DIFF_VIEWS = "partita.inspection.diff.views"


def run(path: Path, against: Path | None, asked: Asked) -> None:
    """Look, and show. What is wrong with it was asked about, and is no error. Raises UsageError, PackageError."""
    if against is None:
        showing = prepare(asked, VIEWS, files_of(path))
        showing.show(read(path))
        return
    from partita.inspection.diff.compare import compare

    showing = prepare(asked, DIFF_VIEWS, (*files_of(path), *files_of(against)))
    showing.show(compare(read(path), read(against)))
