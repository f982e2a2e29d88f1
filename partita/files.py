"""Output files of a command, checked against its inputs and written atomically; folders that the environment names."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from partita.errors import ReportError, UsageError
from partita.signals import hold_signals

STDIN = Path("/dev/stdin")
"""The path of standard input, as an input file."""


@dataclass(frozen=True, slots=True)
class Output:
    """A checked output file."""

    path: Path
    kind: str
    """Kind of its content, for messages: report, trace, page."""

    def write(self, text: str) -> None:
        """Write `text`, in UTF-8. Raises ReportError when the file cannot be written."""
        write_text(text, self.path, self.kind)


def reserve(path: Path, kind: str, reads: Iterable[Path], *, option: str) -> Output:
    """Check that `path` is writable and is not an input.

    `reads`: input files and folders; stdin is one, too. `option`: the option of `path`, for messages. Raises UsageError
    for an input or a file in an input folder, ReportError for a path that cannot be written.
    """
    if "\0" in str(path):
        raise UsageError(f"{option}: the name of the {kind} contains a NUL byte")
    for read in (*reads, STDIN):
        refuse_same(path, read, option)
    check_writable(path, kind)
    return Output(path, kind)


def refuse_same(path: Path, read: Path, option: str) -> None:
    """Raise UsageError when `path` is `read`, directly or through links, or lies in that folder."""
    place, source = resolve_path(path), resolve_path(read)
    if read.is_dir() and place.is_relative_to(source):
        raise UsageError(f"{option} {path}: inside {read}, which this command reads; choose another place")
    if place == source and (path.is_file() or not path.exists()):  # a terminal or a pipe may be read and written
        verb = "reads" if read.exists() else "writes as well"
        named = "the file that stdin reads" if read == STDIN else f"{read}, which this command {verb}"
        raise UsageError(f"{option} {path}: the same file as {named}; name another")


def resolve_path(path: Path) -> Path:
    """The path without symbolic links. `Path.resolve` raises RuntimeError for a loop of links before Python 3.13."""
    return Path(os.path.realpath(path))


def check_writable(path: Path, kind: str) -> None:
    """Raise ReportError if `path` cannot be written, before a long run."""
    if path.is_dir():
        raise ReportError(f"{path}: a folder; give a file name for the {kind}")
    place = resolve_path(path)  # of a link, the file that it names
    if not place.parent.is_dir():
        parent = place.parent if path.is_symlink() else path.parent
        raise ReportError(f"{path}: the folder {parent} does not exist; make it first")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise ReportError(f"{path}: no permission to write there; choose another file")


def write_text(text: str, path: Path, kind: str) -> None:
    """Write `text` in UTF-8 as `write_bytes` does."""
    write_bytes(text.encode("utf-8"), path, kind)


def write_bytes(data: bytes, path: Path, kind: str) -> None:
    """Write `data` to `path` atomically.

    Symbolic links are followed. Pipes, terminals, devices, /dev/stdout and /dev/stderr are written directly. Raises
    ReportError.
    """
    try:
        stream = {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(path))
        if stream is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            with os.fdopen(os.dup(stream), "wb") as file:
                file.write(data)
        elif path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            replace(resolve_path(path), data)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ReportError(f"{path}: cannot write the {kind}: {reason}; choose another file for it") from error


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder that is removed at the end of the block and when a signal ends this process.

    Errors of the removal are ignored: a killed child may still be writing.
    """
    with hold_signals():
        return tempfile.TemporaryDirectory(prefix="partita-", ignore_cleanup_errors=True)


def replace(path: Path, data: bytes | str) -> None:
    """Write `data` (text in UTF-8) to a temporary file next to `path` and rename it; permissions stay. Raises OSError.

    Writes in place if the folder is read-only or the file is a mount point.
    """
    content = data.encode("utf-8") if isinstance(data, str) else data
    try:
        _rename_over(path, content)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS) or not os.access(path, os.W_OK):
            raise
        path.write_bytes(content)


def _rename_over(path: Path, content: bytes) -> None:
    # A short new name: a name of the maximum length has no room for a suffix.
    temporary = path.with_name(f".partita-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            with suppress(FileNotFoundError):
                temporary.chmod(stat.S_IMODE(path.stat().st_mode))
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


CACHE_VARIABLE = "PARTITA_CACHE_DIR"
"""Environment variable with the cache folder; set but empty: no caching."""
PROFILES_VARIABLE = "PARTITA_PROFILES"
"""Environment variable with a folder in which ONNX Runtime's profiles of observed sessions are kept."""
NAME = "partita"


def cache_folder(kind: str) -> Path | None:
    """The cache folder of a kind, which may not exist yet; None if caching is off or there is no cache folder.

    `PARTITA_CACHE_DIR`, else the user's cache folder: `$XDG_CACHE_HOME` or `~/.cache`, `~/Library/Caches` on macOS,
    `%LOCALAPPDATA%` on Windows.
    """
    given = os.environ.get(CACHE_VARIABLE)
    if given is not None:
        return Path(given) / kind if given else None
    import platformdirs

    try:
        folder = platformdirs.user_cache_path(NAME, appauthor=False, opinion=False) / kind
    except (OSError, RuntimeError, ValueError):  # a user without a home; Windows without the folder or its registry
        return None
    return folder if folder.is_absolute() else None


def profiles_folder() -> Path | None:
    """The folder in which profiles are kept, created; None if they are not. Raises UsageError if it is unusable."""
    given = os.environ.get(PROFILES_VARIABLE)
    if not given:
        return None
    return usable_folder(given, PROFILES_VARIABLE)


def usable_folder(given: str, setting: str) -> Path:
    """A writable folder, created if needed. Raises UsageError, which names its setting."""
    folder = Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "not a folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise UsageError(f"{setting}={given}: {reason}; name a writable folder") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{setting}={given}: not writable; name a writable folder")
    return folder
