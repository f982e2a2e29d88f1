"""What the verbs write for their user, a file or stdout, and what they read, which none of them may write over."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from partita.commands.terminal import note, write_stdout_bytes
from partita.errors import PackageError, UsageError
from partita.files import Output, claim
from partita.remedies import shell

STDOUT = Path("-")
OTHER_NAMES = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


@dataclass(frozen=True, slots=True)
class Stdout:
    """Where `-` sends a report or a page."""

    path: Path = STDOUT

    def write(self, text: str) -> None:
        """Write `text` in UTF-8, as a file has it, whatever the terminal takes; a reader that has gone is no error."""
        write_stdout_bytes(text.encode("utf-8"))


Sink = Output | Stdout


def claim_output(path: Path, what: str, reads: Iterable[Path], *, option: str) -> Sink:
    """Where a text goes that the user wants in `path`; `-` is stdout. Raises what `partita.files.claim` raises."""
    return Stdout() if path == STDOUT else claim(path, what, reads, option=option)


def say_written(what: str, path: Path | str) -> None:
    """A note on where a report or result is, and the command that shows it, as a shell takes it."""
    note(f"{what}: {path} (see it with: {shell(('partita', 'report', 'show', str(path)))})")


def goes_to_stdout(path: Path) -> bool:
    """Whether what is written to `path` comes out of stdout, or into the file that stdout is redirected to."""
    if path == STDOUT or str(path) in OTHER_NAMES:
        return True
    with suppress(OSError):
        mine, theirs = path.stat(), os.fstat(1)
        return os.path.samestat(mine, theirs) and (stat.S_ISREG(mine.st_mode) or stat.S_ISFIFO(mine.st_mode))
    return False


def refuse_two_on_stdout(report: Path | None, *, as_json: bool) -> None:
    """Raise UsageError when a report and another JSON object would both go to stdout."""
    if report is not None and as_json and goes_to_stdout(report):
        raise UsageError(f"--report {report} and --json would both write to stdout; give --report another file")


def data_files(model: Path) -> tuple[Path, ...]:
    """Files that hold the weights of an ONNX file; none when it cannot be read, which is said where it is opened."""
    from partita.runtime.onnx_model import read_onnx

    try:
        return tuple(model.parent / name for name in read_onnx(model).data_files)
    except PackageError:
        return ()
