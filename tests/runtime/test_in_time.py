"""Work that may never end, and the thread that waits for it."""

from __future__ import annotations

import threading
import time

import pytest

from partita.runtime import in_time as patience
from partita.runtime.in_time import LateError, in_time, left


def test_what_ends_in_time_gives_its_value_or_its_error():
    assert in_time(lambda: 3, lambda: None, 60.0) == 3
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 // 0, lambda: None, 60.0)
    assert not left()


def test_what_stops_when_it_is_asked_to_is_late_and_not_left():
    asked = threading.Event()

    def work() -> None:
        asked.wait()
        raise OSError("stopped")

    with pytest.raises(LateError) as late:
        in_time(work, asked.set, 0.05)
    assert not late.value.left and not left(work)


def test_what_ends_while_it_is_asked_to_has_ended():
    asked = threading.Event()
    assert in_time(lambda: asked.wait(), asked.set, 0.05) is True


def test_what_never_stops_is_left(monkeypatch):
    monkeypatch.setattr(patience, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(patience, "_left", [])
    ended = threading.Event()

    def work() -> None:
        ended.wait()

    with pytest.raises(LateError) as late:
        in_time(work, lambda: None, 0.05)
    assert late.value.left and left(work) and left()
    ended.set()


def test_a_signal_is_heard_while_the_work_goes_on(monkeypatch):
    """Native code that is called in the main thread would keep Python from hearing it."""
    asked = threading.Event()
    began = time.monotonic()

    def press(ended: threading.Event, seconds: float) -> bool:
        monkeypatch.setattr(patience, "_wait", wait)
        raise KeyboardInterrupt

    wait = patience._wait
    monkeypatch.setattr(patience, "_wait", press)
    with pytest.raises(KeyboardInterrupt):
        in_time(lambda: asked.wait(60), asked.set, 60.0)
    assert asked.is_set() and not left() and time.monotonic() - began < 30
