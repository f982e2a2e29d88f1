"""Safe reading of untrusted files: regular files inside their folder only, with size limits and checked JSON values."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, TypeGuard

LARGEST_BYTES = 128 << 20
"""Limit of a text file of a model, and of a journal line. The largest known tokenizer.json has 33 MB (Gemma 3)."""
LARGEST_REPORT_BYTES = 256 << 20
"""Limit of a report or another record that Partita writes."""
MOST_BYTES = 1 << 50
"""Effectively no limit, for files that are mapped into memory."""
LARGEST_INTEGER = (1 << 64) - 1
OPEN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Paths of open file descriptors of this process."""
KINDS = {"d": "a folder", "p": "a FIFO", "s": "a socket"}
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def irregular(path: Path, folder: Path) -> str:
    """Why a file of a model folder must not be opened; empty if it may be opened or does not exist.

    Allowed are regular files in the folder, and links to such files or to blobs of the Hugging Face cache in which the
    folder is a snapshot. Raises OSError.
    """
    if not os.path.lexists(path):
        return ""
    if path.is_symlink() and not path.exists():
        return f"a broken symbolic link to {path.readlink()}"
    # Not Path.resolve, which raises RuntimeError for link loops.
    target, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if not target.is_relative_to(home) and not _is_blob(target, home):
        return f"a link out of the folder, to {target}"
    return kind_of(path)


def kind_of(path: Path) -> str:
    """The kind of a path that is not a regular file; empty for a regular file."""
    mode = path.stat().st_mode
    return "" if stat.S_ISREG(mode) else f"{KINDS.get(stat.filemode(mode)[0], 'a device')}, not a regular file"


def read_capped(path: Path, limit: int = LARGEST_BYTES, *, stream: bool = False) -> str:
    """The UTF-8 text of a regular file. Raises OSError, and ValueError for a file that is too large or not UTF-8.

    `stream`: an open pipe is allowed, too (/dev/stdin, /dev/fd/63), because the user named the path.
    """
    pipe = stream and str(path).startswith(OPEN)
    if not pipe:
        check_size(path, limit)
    with path.open("rb") as file:
        data = file.read(limit + 1 if pipe else -1)  # a size makes Python allocate it
    if len(data) > limit:
        raise ValueError(f"larger than the limit of {limit:,} bytes")
    return data.decode("utf-8")


def read_json_value(path: Path) -> Any:
    """The JSON value in a file. Raises OSError, and ValueError for a file that is too large or not JSON."""
    return parse_json(read_capped(path))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for invalid JSON and for nesting beyond Python's recursion limit."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parsed_record(text: str) -> Any:
    """The value of a JSON text that Partita wrote.

    Raises ValueError for invalid JSON, integers of more than 64 bits, and lone surrogates.
    """
    value = parse_json(text)
    json.loads(text, parse_int=_integer)
    if SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it contains a lone surrogate") from error
    return value


def _integer(digits: str) -> int:
    if abs(value := int(digits)) > LARGEST_INTEGER:
        raise ValueError("it contains an integer of more than 64 bits")
    return value


def check_size(path: Path, limit: int = LARGEST_BYTES) -> None:
    """Raise ValueError for a file above the limit and OSError for a path that is not a regular file."""
    if reason := kind_of(path):
        raise OSError(errno.EINVAL, reason, str(path))
    if (size := path.stat().st_size) > limit:
        raise ValueError(f"{size:,} bytes, above the limit of {limit:,} bytes")


def _is_blob(target: Path, folder: Path) -> bool:
    """Whether a file is a blob of the Hugging Face cache of `folder`, whose `snapshots/REVISION` links into `blobs`."""
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    return snapshots is not None and target.parent == snapshots.parent / "blobs"


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a finite number that fits a float; booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
