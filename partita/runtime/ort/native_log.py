"""ONNX Runtime's own log lines: captured from the file descriptors, and read.

ONNX Runtime writes them from native code, past Python's sys.stderr, so only the descriptor itself can be redirected.
Not safe while other threads write to stdout or stderr: their lines would be captured too. Does not know what a line
means.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from partita import streams

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ (?=\[[VIWEF]:onnxruntime:)")
HEAD = re.compile(r"^\[(?P<severity>[VIWEF]):onnxruntime:[^\]]*\] (?P<text>.*)", re.DOTALL)

_CAPTURING = threading.RLock()
"""Two threads that redirect at a time would give back each other's files in place of the descriptors."""


class Captured:
    """Lines that were captured, in order; complete once the capture has ended."""

    def __init__(self) -> None:
        self.lines: tuple[str, ...] = ()


@contextmanager
def captured_output(descriptors: tuple[int, ...] = (1, 2)) -> Iterator[Captured]:
    """Send everything written to file descriptors 1 and 2 into a temporary file, and give its lines at the end.

    Some providers write to descriptor 1, where only results belong. The descriptors are restored however the block
    ends. Lines have no time stamps and no colours. In the process of a program that imports Partita
    (`streams.own_process`) nothing is redirected, and there are no lines.
    """
    if not streams.own_process:
        yield Captured()
        return
    with _CAPTURING:
        yield from _captured(descriptors)


def _captured(descriptors: tuple[int, ...]) -> Iterator[Captured]:
    captured = Captured()
    for descriptor in (streams.STDOUT, streams.STDERR):  # else the file below would get the number
        streams.fill(descriptor, os.O_WRONLY)
    with tempfile.TemporaryFile() as sink:
        python = _flushed(sys.stdout, sys.stderr)
        saved = {descriptor: os.dup(descriptor) for descriptor in descriptors}
        try:
            for descriptor in saved:
                os.dup2(sink.fileno(), descriptor)
            yield captured
        finally:
            _flushed(*python)
            for descriptor, copy in saved.items():
                os.dup2(copy, descriptor)
                os.close(copy)
            sink.seek(0)
            captured.lines = clean_lines(sink.read().decode("utf-8", errors="replace"))


def _flushed(*python: TextIO | None) -> tuple[TextIO, ...]:
    """Those of Python's streams that have nothing left to write: a line belongs on the side of the redirection on which
    it was written. What cannot be written stays in its stream, whose next line, or the end of the process, tells of it.
    """
    return tuple(stream for stream in python if stream is not None and _flush(stream))


def _flush(stream: TextIO) -> bool:
    with suppress(OSError, ValueError):  # the second where somebody has closed it
        stream.flush()
        return True
    return False


def clean_lines(text: str) -> tuple[str, ...]:
    """Lines of `text` without colours, time stamps and blank lines."""
    lines = (STAMP.sub("", COLOUR.sub("", line)).rstrip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def complaints(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Texts of the error lines, without their heads; of the warnings when there is no error."""
    parsed = [match for line in lines if (match := HEAD.match(line))]
    for severity in ("F", "E", "W"):
        texts = tuple(match["text"].strip() for match in parsed if match["severity"] == severity)
        if texts:
            return texts
    return ()


def headless(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Lines that are not of ONNX Runtime's log: what libraries print by themselves."""
    return tuple(line.strip() for line in lines if not HEAD.match(line))
