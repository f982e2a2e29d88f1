"""`--input -`: rows from a pipe, kept in a file while the command runs, because a prompt file is read twice."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from partita.commands.terminal import note
from partita.errors import ResourceError, UsageError
from partita.files import STDIN
from partita.library.batches.running import PIPE


def read_from(source: Path) -> Path:
    """The file that the command reads, for checks of its outputs."""
    return STDIN if source == PIPE else source


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
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="partita-rows-"))
            file = Path(folder) / "stdin.jsonl"
            with file.open("wb") as kept:
                shutil.copyfileobj(sys.stdin.buffer, kept)
        except OSError as error:
            raise ResourceError(
                f"--input -: the rows cannot be kept ({error.strerror}); set TMPDIR to a folder with room, or "
                "put the rows into a file"
            ) from error
        yield file
