"""`partita inspect`: what a package or folder holds; and what is different in another one."""

from __future__ import annotations

from pathlib import Path

from partita.commands.showing import Asked, prepare
from partita.foreign.folder import AS_IT_IS, Choice
from partita.library.inspecting import check_other, files_of, read

VIEWS = "partita.inspection.views"
DIFF_VIEWS = "partita.inspection.diff.views"


def run(
    path: Path,
    against: Path | None,
    asked: Asked,
    choice: Choice = AS_IT_IS,
    other: Choice = AS_IT_IS,
    *,
    hashes: bool = False,
) -> None:
    """Look, and show. What is wrong with it was asked about, and is no error. `other`: of `against`.

    Raises UsageError, PackageError.
    """
    check_other(against, other)
    reads = (*files_of(path), *choice.reads)
    if against is None:
        showing = prepare(asked, VIEWS, reads)
        showing.show(read(path, choice, hashes=hashes))
        return
    from partita.inspection.diff.compare import compare

    showing = prepare(asked, DIFF_VIEWS, (*reads, *files_of(against), *other.reads))
    showing.show(compare(read(path, choice, hashes=hashes), read(against, other, hashes=hashes)))
