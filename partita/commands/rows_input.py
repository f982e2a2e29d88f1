"""`--input -`: rows that come through a pipe. They are kept in a file while the command runs, because a file of prompts
is read twice: to know which run it is, so that the same rows go on with it, and for the rows.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partita.commands.terminal import note
from partita.errors import ResourceError, UsageError
from partita.files import STDIN
from partita.library.batches.running import PIPE


def read_from(source: Path) -> Path:
    """What the command reads where it is given `source`, for those that check what it writes."""
    return STDIN if source == PIPE else source


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for the rows. Raises ResourceError where none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix="partita-rows-")
    except OSError as error:
        raise ResourceError(f"--input -: {error.strerror}; have TMPDIR name a folder with room for the rows") from error


@contextmanager
def rows_file(source: Path) -> Iterator[Path]:
    """The file with the rows of `source`, for as long as the block runs. Raises UsageError, ResourceError."""
    if source != PIPE:
        yield source
        return
    if sys.stdin is None:
        raise UsageError("--input - reads rows from stdin, which is closed; name a file")
    if sys.stdin.isatty():
        note("note: reading rows from the terminal, a JSON object per line, until Ctrl-D on a line of its own")
    with _scratch() as folder:
        file = Path(folder) / "stdin.jsonl"
        try:
            with file.open("wb") as kept:
                shutil.copyfileobj(sys.stdin.buffer, kept)
        except OSError as error:
            raise ResourceError(
                f"--input -: the rows cannot be kept in {folder} ({error.strerror or os.strerror(error.errno or 0)}); "
                "have TMPDIR name a folder with room for them, or put them into a file"
            ) from error
        yield file
