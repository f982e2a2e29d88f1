"""ONNX Runtime's own log lines: captured from file descriptor 2, and read.

ONNX Runtime writes them from native code, past Python's sys.stderr, so only the descriptor itself can be redirected.
Not safe while other threads write to stderr: their lines would be captured too. Does not know what a line means.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ (?=\[[VIWEF]:onnxruntime:)")
HEAD = re.compile(r"^\[(?P<severity>[VIWEF]):onnxruntime:[^\]]*\] (?P<text>.*)", re.DOTALL)


class Captured:
    """Lines that were captured, in order; complete once the capture has ended."""

    def __init__(self) -> None:
        self.lines: tuple[str, ...] = ()


@contextmanager
def captured_stderr() -> Iterator[Captured]:
    """Send everything written to file descriptor 2 into a temporary file, and give its lines at the end.

    The descriptor is restored however the block ends. Lines have no time stamps and no colours. When the process has no
    descriptor 2, nothing is captured.
    """
    captured = Captured()
    try:
        saved = os.dup(2)
    except OSError:
        yield captured
        return
    with tempfile.TemporaryFile() as sink:
        try:
            flush_python_stderr()
            os.dup2(sink.fileno(), 2)
            yield captured
        finally:
            flush_python_stderr()
            os.dup2(saved, 2)
            os.close(saved)
            sink.seek(0)
            captured.lines = clean_lines(sink.read().decode("utf-8", errors="replace"))


def flush_python_stderr() -> None:
    """Python's own lines belong on the side of the redirection on which they were written."""
    if sys.stderr is not None:
        sys.stderr.flush()


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
