"""Work in native code that may never end, in a thread of its own, with a time limit and Ctrl-C.

Python can stop no thread. Work that does not stop when it is asked to goes on (`left`): the objects that it uses must
live, and the process has to end without waiting for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")
STOP_SECONDS = 2.0
"""For work to stop, once it is asked to."""
POLL_SECONDS = 0.2
"""Where a wait cannot be interrupted (Windows), it ends this often for Ctrl-C."""
_left: list[Callable[[], Any]] = []


class LateError(Exception):
    """Work did not end in time; `left`: nor did it stop when it was asked to."""

    def __init__(self, *, left: bool) -> None:
        super().__init__()
        self.left = left


def in_time(work: Callable[[], T], stop: Callable[[], None], seconds: float) -> T:
    """The result of `work`. `stop` asks it to stop, from this thread.

    Raises LateError when it takes longer than `seconds`, and whatever `work` raises. An exception that a signal raises
    here is raised when the work has stopped, or after `STOP_SECONDS`.
    """
    future: Future[T] = Future()

    def in_thread() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            future.set_exception(error)

    threading.Thread(target=in_thread, daemon=True).start()
    try:
        in_limit = _ended(future, seconds)
    except BaseException:
        _stop(work, stop, future)
        raise
    if not in_limit:
        _stop(work, stop, future)
        if not future.done() or future.exception() is not None:
            raise LateError(left=not future.done())
    return future.result()


def left(work: Callable[[], Any] | None = None) -> bool:
    """Whether a thread of this process still does work that did not stop: this work, or any."""
    return bool(_left) if work is None else work in _left


def _stop(work: Callable[[], Any], stop: Callable[[], None], future: Future[Any]) -> None:
    """Ask the work to stop, and keep it with the objects that it uses when it does not."""
    _left.append(work)  # before the wait, which a signal may cut short
    stop()
    if _ended(future, STOP_SECONDS):
        _left.remove(work)


def _ended(future: Future[Any], seconds: float) -> bool:
    """Wait for the end of the work, at most `seconds`; whether it has ended."""
    until = time.monotonic() + seconds
    while not future.done() and (remaining := until - time.monotonic()) > 0:
        wait([future], min(POLL_SECONDS, remaining))
    return future.done()
