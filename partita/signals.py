"""SIGTERM, SIGHUP and SIGINT as exceptions, so that worker processes and temporary files are removed on the way out."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Sent by a supervisor or batch system, and by a terminal that closes."""
TOGETHER_SECONDS = 5.0
"""Signals within this time count as one: when a terminal closes, it and its shell both send SIGHUP."""
PRESSED_SECONDS = 0.3
"""The same for Ctrl-C, which children may receive from the terminal and from their parent."""

AGAIN_SECONDS = 0.05
"""Delay before a signal is sent again whose exception Python dropped in a callback."""


class TerminatedError(SystemExit):
    """A signal of `ENDING` was received. The exit code is 128 plus its number, as in shells."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        self.name = signal.Signals(number).name
        super().__init__(self.exit_code)


@dataclass(slots=True)
class _Watch:
    """The state of `ended_by_exception`."""

    handlers: dict[int, Any] = field(default_factory=dict)
    """Handlers to restore, by signal."""
    received: int | None = None
    received_at: float = -TOGETHER_SECONDS
    depth: int = 0
    """Number of open `held` blocks."""
    pending: int | None = None
    """Signal received in a `held` block."""


_watch: _Watch | None = None


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise TerminatedError in the main thread, so that clean-up code runs.

    Ignored signals stay ignored (nohup). Repetitions within `TOGETHER_SECONDS` are dropped, so that they do not
    interrupt the clean-up. Nested blocks and blocks in other threads have no effect.
    """
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch = _Watch()
    for number in (*ENDING, signal.SIGINT):
        handler = signal.getsignal(number)
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            _watch.handlers[number] = handler
            signal.signal(number, _handle)
    hook, sys.unraisablehook = sys.unraisablehook, _again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in _watch.handlers.items():
            signal.signal(number, handler)
        _watch = None


@contextmanager
def hold_signals() -> Iterator[None]:
    """Delay the exception of a signal to the end of the block, e.g. between creating and registering a resource."""
    watch = _watch
    if watch is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch.depth += 1
    try:
        yield
    finally:
        watch.depth -= 1
    if watch.pending is not None and not watch.depth:
        number, watch.pending = watch.pending, None
        signal.raise_signal(number)


def received_signal() -> BaseException | None:
    """The exception of the last signal; None if there was none.

    Native code may replace it: an interrupted import raises ImportError.
    """
    return None if _watch is None or _watch.received is None else _exception(_watch.received)


def _handle(number: int, frame: object) -> None:
    """Raise the exception of a signal, unless it repeats the last one or signals are held."""
    if _watch is not None:
        if _watch.depth:
            _watch.pending = number
            return
        now = time.monotonic()
        if now - _watch.received_at < (PRESSED_SECONDS if number == signal.SIGINT else TOGETHER_SECONDS):
            return
        _watch.received, _watch.received_at = number, now
    raise _exception(number)


def _again(lost: sys.UnraisableHookArgs) -> None:
    """Send a signal again whose exception Python dropped in a callback or a finaliser."""
    number = None if _watch is None else _watch.received
    if number is None or not isinstance(lost.exc_value, KeyboardInterrupt | TerminatedError):
        sys.__unraisablehook__(lost)
        return
    assert _watch is not None
    _watch.received_at = -TOGETHER_SECONDS
    timer = threading.Timer(AGAIN_SECONDS, _send, [number])
    timer.daemon = True
    timer.start()


def _send(number: int) -> None:
    """Send a signal to the main thread; with pthread_kill it interrupts blocking calls."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


def _exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else TerminatedError(number)
