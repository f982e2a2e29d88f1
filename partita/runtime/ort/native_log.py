"""Captures ONNX Runtime's log lines from the file descriptors, and parses them.

ONNX Runtime writes from native code, so only the descriptors can be redirected, not sys.stderr. While it captures,
lines of other threads are captured, too. `set_default_logger_callback` of ONNX Runtime 1.32 does not replace this: it
receives neither messages of ONNX Runtime's own threads nor what provider libraries print (QNN's start, CUDA's
SdpaKernel lines), cannot restore a callback of the user's program, and does not exist in earlier versions.
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

from partita import process

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ (?=\[[VIWEF]:onnxruntime:)")
HEAD = re.compile(r"^\[(?P<severity>[VIWEF]):onnxruntime:[^\]]*\] (?P<text>.*)", re.DOTALL)

VERBOSE, INFO, WARNING, FATAL = 0, 1, 2, 4
"""Severities of ONNX Runtime."""
_CAPTURING = threading.RLock()
"""Two concurrent redirections would restore each other's files."""


class CapturedLog:
    """Captured lines in order, complete when the capture has ended."""

    def __init__(self) -> None:
        self.lines: tuple[str, ...] = ()


@contextmanager
def captured_output(descriptors: tuple[int, ...] = (1, 2)) -> Iterator[CapturedLog]:
    """Redirect file descriptors 1 and 2 to a temporary file, and return its lines at the end.

    Some providers write to descriptor 1, which is for results. The descriptors are always restored. Lines have no time
    stamps and colours. In a program that imports Partita (`process.own_process` is False), nothing is redirected.
    """
    if not process.own_process:
        yield CapturedLog()
        return
    with _CAPTURING:
        yield from _capture(descriptors)


def _capture(descriptors: tuple[int, ...]) -> Iterator[CapturedLog]:
    captured = CapturedLog()
    for descriptor in (process.STDOUT, process.STDERR):  # otherwise the file below would get this number
        process.fill(descriptor, os.O_WRONLY)
    with tempfile.TemporaryFile() as sink:
        python = _flush_streams(sys.stdout, sys.stderr)
        saved = {descriptor: os.dup(descriptor) for descriptor in descriptors}
        try:
            for descriptor in saved:
                os.dup2(sink.fileno(), descriptor)
            yield captured
        finally:
            _flush_streams(*python)
            for descriptor, copy in saved.items():
                os.dup2(copy, descriptor)
                os.close(copy)
            sink.seek(0)
            captured.lines = clean_lines(sink.read().decode("utf-8", errors="replace"))


def _flush_streams(*python: TextIO | None) -> tuple[TextIO, ...]:
    """Python streams without pending output, which must not be written to the other side of a redirection.

    A stream that cannot be flushed reports its error at its next write, or at exit.
    """
    flushed = []
    for stream in filter(None, python):
        with suppress(OSError, ValueError):  # ValueError: closed by other code
            stream.flush()
            flushed.append(stream)
    return tuple(flushed)


class RunLog:
    """The log at INFO of the first captured run of each phase of a session.

    Captured in Partita's own processes and their main thread only: in another thread the redirection could outlast a
    run that does not end.
    """

    def __init__(self) -> None:
        self.lines: dict[str, tuple[str, ...]] = {}
        self.severity = FATAL
        """Minimum severity that a run logs."""

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Capture a run of a phase, and keep its lines if it is the first."""
        if not process.own_process or threading.current_thread() is not threading.main_thread():
            yield
            return
        with captured_output() as captured:
            self.severity = INFO
            try:
                yield
            finally:
                self.severity = FATAL
        self.lines.setdefault(phase, captured.lines)


def clean_lines(text: str) -> tuple[str, ...]:
    """Lines of `text` without colours, time stamps and blank lines."""
    lines = (STAMP.sub("", COLOUR.sub("", line)).rstrip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def complaints(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Error messages in these lines, without their prefixes; warnings if there is no error."""
    parsed = [match for line in lines if (match := HEAD.match(line))]
    for severity in ("F", "E", "W"):
        texts = tuple(match["text"].strip() for match in parsed if match["severity"] == severity)
        if texts:
            return texts
    return ()


def headless(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Lines without an ONNX Runtime log prefix, printed by other libraries."""
    return tuple(line.strip() for line in lines if not HEAD.match(line))
