"""Where an export puts what does not fit in memory: on the disk of the package, whose room it speaks of."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO

_folder: ContextVar[Path | None] = ContextVar("partita_scratch", default=None)


@contextmanager
def scratch_in(folder: Path) -> Iterator[None]:
    """Files without a name that are made in a `with` block are on the disk of `folder`."""
    before = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(before)


def unnamed_file() -> IO[bytes]:
    """A file for as long as it is open; nothing is left of an export that is killed. Raises OSError."""
    return tempfile.TemporaryFile(dir=_folder.get())
