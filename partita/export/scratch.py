"""Temporary files of an export, on the disk of the package."""

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
    """Unnamed files created in the block are on the disk of `folder`."""
    before = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(before)


def unnamed_file() -> IO[bytes]:
    """A temporary file without a name, removed even after a kill. Raises OSError."""
    return tempfile.TemporaryFile(dir=_folder.get())
