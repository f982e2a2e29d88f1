"""Work that may never end, and the thread that waits for it."""

from __future__ import annotations

import threading

import pytest

from partita.runtime import time_limit as patience
from partita.runtime.time_limit import LateError, in_time, is_still_running


def test_work_that_ends_in_time_gives_its_value_or_its_error():
    assert in_time(lambda: 3, lambda: None, 60.0) == 3
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 // 0, lambda: None, 60.0)
    assert not is_still_running()


def test_work_that_stops_when_it_is_asked_to_is_late_and_not_left():
    asked = threading.Event()

    def work() -> None:
        asked.wait()
        raise OSError("stopped")

    with pytest.raises(LateError) as late:
        in_time(work, asked.set, 0.05)
    assert not late.value.left and not is_still_running(work)
    again = threading.Event()
    assert in_time(lambda: again.wait(), again.set, 0.05) is True, "it has a result by then"


def test_work_that_never_stops_is_left(monkeypatch):
    monkeypatch.setattr(patience, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(patience, "_running", [])
    ended = threading.Event()

    def work() -> None:
        ended.wait()

    with pytest.raises(LateError) as late:
        in_time(work, lambda: None, 0.05)
    assert late.value.left and is_still_running(work) and is_still_running()
    ended.set()


def test_an_interruption_while_the_work_goes_on(monkeypatch):
    asked = threading.Event()

    def press(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(patience, "wait", press)
    with pytest.raises(KeyboardInterrupt):
        in_time(lambda: asked.wait(60), asked.set, 60.0)
    assert asked.is_set() and not is_still_running()
