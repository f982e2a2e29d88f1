"""Work in native code that may never end: it is done in a thread of its own, and the one that waits for it hears
Ctrl-C and looks at the clock.

Python can stop no thread. Work that does not stop by itself once it is asked to is left where it is: what it uses must
stay (`left`), and the process has to end without waiting for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
STOP_SECONDS = 2.0
"""For work to stop, once it is asked to."""
POLL_SECONDS = 0.2
"""Where a wait cannot be interrupted (Windows), Ctrl-C is heard as often."""
_left: list[Callable[[], Any]] = []


class LateError(Exception):
    """Work did not end in time; `left`: nor did it stop when it was asked to."""

    def __init__(self, *, left: bool) -> None:
        super().__init__()
        self.left = left


def in_time(work: Callable[[], T], stop: Callable[[], None], seconds: float) -> T:
    """What `work` gives. `stop` asks it to stop, from this thread.

    Raises LateError when it took longer than `seconds`, and whatever `work` raises. An exception that a signal raises
    here is raised when the work has stopped, or is left.
    """
    ended = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def in_thread() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=in_thread, daemon=True).start()
    try:
        _wait(ended, seconds)
    except BaseException:
        _stop(work, stop, ended)
        raise
    if not ended.is_set():
        _stop(work, stop, ended)
        if not results:
            raise LateError(left=not ended.is_set())
    if errors:
        raise errors.pop()
    return results.pop()


def left(work: Callable[[], Any] | None = None) -> bool:
    """Whether a thread of this process still does what nobody waits for: this, or anything."""
    return bool(_left) if work is None else work in _left


def _stop(work: Callable[[], Any], stop: Callable[[], None], ended: threading.Event) -> None:
    """Ask the work to stop; kept with all that it uses when it does not."""
    _left.append(work)  # before the wait, which a signal may cut short
    stop()
    if _wait(ended, STOP_SECONDS):
        _left.remove(work)


def _wait(ended: threading.Event, seconds: float) -> bool:
    """Wait for the end, for so long; whether it came."""
    until = time.monotonic() + seconds
    while not ended.wait(max(min(POLL_SECONDS, until - time.monotonic()), 0.0)):
        if time.monotonic() >= until:
            return False
    return True
