"""Standard streams that are closed when the process starts: `partita generate PACKAGE PROMPT >&-`."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

STDIN, STDOUT, STDERR = range(3)
own_process = False
"""Whether this process is a command or worker of Partita, in which file descriptors may be redirected."""
CLOSED = "standard output is closed; redirect it to a file or to /dev/null"


def open_null_device() -> None:
    """Open the null device in place of closed streams, so that no other file gets their descriptors.

    stdin is opened for writing and stdout for reading, so that their use fails, also in children. Python sets a closed
    stream to None, loses its output silently and sends `print(file=sys.stderr)` to stdout.
    """
    for descriptor, way in ((STDIN, os.O_WRONLY), (STDOUT, os.O_RDONLY), (STDERR, os.O_WRONLY)):
        fill(descriptor, way)
    if sys.stdout is None:
        sys.stdout = os.fdopen(STDOUT, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(STDERR, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def is_closed(error: OSError) -> bool:
    """Whether an error comes from the closed stdout: EBADF without a file name."""
    return error.errno == errno.EBADF and error.filename is None


def fill(descriptor: int, way: int) -> None:
    """Open a closed descriptor on the null device."""
    with suppress(OSError):
        os.fstat(descriptor)
        return
    null = os.open(os.devnull, way)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    else:
        os.set_inheritable(descriptor, True)
