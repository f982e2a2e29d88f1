"""The signals by which others end this process, as exceptions: what was begun is cleared away on the way out."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What a supervisor or a batch system sends, and what a terminal sends that is closed."""
TOGETHER_SECONDS = 5.0
"""Signals that come within this time are one: a terminal that is closed sends SIGHUP, and so does its shell."""
PRESSED_SECONDS = 0.3
"""The same for Ctrl-C, which a terminal sends to every process of a command, and some pass on to their children."""


class TerminatedError(SystemExit):
    """One of these signals came. The exit code is what shells make of one: 128 and its number."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        self.name = signal.Signals(number).name
        super().__init__(self.exit_code)


class _Watch:
    """What is known while somebody is in `ended_by_exception`."""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        """To come back to, by signal."""
        self.received: int | None = None
        self.received_at = -TOGETHER_SECONDS
        self.holding = 0
        self.held: int | None = None
        """What came while signals were held."""


_watch: _Watch | None = None


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise TerminatedError in the main thread, so that children and temporary files go, too.

    A signal that is ignored stays ignored, as nohup wants it. What follows the first one closely is ignored, so that it
    does not cut short what that one set going; what comes later is not, for Python drops an exception that is raised in
    a callback of native code. Inside of another such block, and in other threads, nothing changes.
    """
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch = _Watch()
    for number, stop in (*((number, _terminate) for number in ENDING), (signal.SIGINT, _interrupt)):
        handler = signal.getsignal(number)
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            _watch.handlers[number] = handler
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in _watch.handlers.items():
            signal.signal(number, handler)
        _watch = None


@contextmanager
def held() -> Iterator[None]:
    """Let a signal that comes in this block raise its exception at the end of it.

    Around the making of what has to be cleared away: between a folder and the note that it is there, nothing may come.
    """
    watch = _watch
    if watch is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch.holding += 1
    try:
        yield
    finally:
        watch.holding -= 1
    if watch.held is not None and not watch.holding:
        number, watch.held = watch.held, None
        signal.raise_signal(number)


def received() -> BaseException | None:
    """The exception of the signal that came last; None when none came.

    Native code makes other exceptions of it: an import that is interrupted ends with ImportError.
    """
    if _watch is None or _watch.received is None:
        return None
    return KeyboardInterrupt() if _watch.received == signal.SIGINT else TerminatedError(_watch.received)


def _interrupt(number: int, frame: object) -> None:
    if _take(number, PRESSED_SECONDS):
        raise KeyboardInterrupt


def _terminate(number: int, frame: object) -> None:
    if _take(number, TOGETHER_SECONDS):
        raise TerminatedError(number)


def _take(number: int, together_seconds: float) -> bool:
    """Whether a signal is to raise its exception now."""
    if _watch is None:
        return True
    if _watch.holding:
        _watch.held = number
        return False
    now = time.monotonic()
    if now - _watch.received_at < together_seconds:
        return False
    _watch.received, _watch.received_at = number, now
    return True
