"""Standard streams that were closed by whoever started this process: `partita generate PACKAGE PROMPT >&-`."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

STDIN, STDOUT, STDERR = range(3)
own_process = False
"""Whether this is a process of Partita: a command or a worker. Only there are file descriptors redirected."""
CLOSED = "standard output is closed, and nothing can be written to it; send it to a file or to /dev/null"


def stand_in() -> None:
    """Let nothing else have the descriptor of a closed stream, and let stdout say that it is closed.

    The next file that is opened would get the number, and be read, or written over, as if it were the stream. In its
    place is the null device: as stderr it takes what nobody reads, as stdin and stdout it is opened the wrong way
    round, so that what is read or written there fails, also in a child. Python has None for such a stream: what is
    written to it is lost without a word, and `print(file=sys.stderr)` goes to stdout.
    """
    for descriptor, way in ((STDIN, os.O_WRONLY), (STDOUT, os.O_RDONLY), (STDERR, os.O_WRONLY)):
        fill(descriptor, way)
    if sys.stdout is None:
        sys.stdout = os.fdopen(STDOUT, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(STDERR, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def is_closed(error: OSError) -> bool:
    """Whether an error is that of writing to the closed stdout: the number of the descriptor is no path."""
    return error.errno == errno.EBADF and error.filename is None


def fill(descriptor: int, way: int) -> None:
    """Open a descriptor to the null device where the process lacks it."""
    with suppress(OSError):
        os.fstat(descriptor)
        return
    null = os.open(os.devnull, way)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    else:
        os.set_inheritable(descriptor, True)
