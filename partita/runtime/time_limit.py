"""Runs native code that may not return in a thread, with a time limit and Ctrl-C.

Python cannot stop a thread. Work that does not stop on request keeps running: its objects stay alive, and the process
must exit without waiting for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")
STOP_SECONDS = 2.0
"""Time limit for work to stop after the request."""
POLL_SECONDS = 0.2
"""Polling interval for Ctrl-C if a wait cannot be interrupted (Windows)."""
_running: list[Callable[[], Any]] = []


class LateError(Exception):
    """Work exceeded its time limit. `still_running`: it did not stop on request either."""

    def __init__(self, *, still_running: bool) -> None:
        super().__init__()
        self.still_running = still_running


def in_time(work: Callable[[], T], stop: Callable[[], None], seconds: float) -> T:
    """The result of `work`. `stop` requests it to stop, from this thread.

    Raises LateError after `seconds`, and the exceptions of `work`. An exception from a signal is raised when the work
    has stopped, or after `STOP_SECONDS`.
    """
    future: Future[T] = Future()

    def in_thread() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
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
            raise LateError(still_running=not future.done())
    return future.result()


def is_still_running(work: Callable[[], Any]) -> bool:
    """Whether work that did not stop is still running in this process."""
    return work in _running


def _stop(work: Callable[[], Any], stop: Callable[[], None], future: Future[Any]) -> None:
    """Request the work to stop; keep its objects alive if it does not."""
    _running.append(work)  # before the wait, which a signal may interrupt
    stop()
    if _ended(future, STOP_SECONDS):
        _running.remove(work)


def _ended(future: Future[Any], seconds: float) -> bool:
    """Whether the work ends within `seconds`."""
    until = time.monotonic() + seconds
    while not future.done() and (remaining := until - time.monotonic()) > 0:
        wait([future], min(POLL_SECONDS, remaining))
    return future.done()
