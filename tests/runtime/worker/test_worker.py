"""A worker process: calls, events, and every way in which it can end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from partita.errors import GenerationError, PartitaError, ProviderError
from partita.runtime.worker.parent import Worker, WorkerLostError

MODULE = "tests.runtime.worker.handlers"
SECONDS = 60.0


@pytest.fixture
def worker():
    with Worker(MODULE) as started:
        yield started


def wait_until(holds):
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_worker_handles_calls_from_several_threads(worker):
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append((n, worker.call("add", n, 1, start=1, timeout=SECONDS))))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(n, n + 2) for n in range(20)]


def test_worker_has_its_own_folder_environment_and_main(monkeypatch):
    monkeypatch.setenv("OF_PARENT", "yes")
    with Worker(MODULE) as worker:
        value, folder, has_file = worker.call("environment", "OF_PARENT")
        assert (value, Path(folder)) == ("yes", worker.folder) and not has_file
    assert not worker.folder.exists() and worker.process.returncode == 0
    with Worker(MODULE, environment={"OTHER": "1", "PATH": os.environ["PATH"]}) as worker:
        assert worker.call("environment", "OF_PARENT")[0] is None and worker.call("environment", "OTHER")[0] == "1"


def test_worker_stdout_does_not_corrupt_messages(worker):
    assert worker.call("print") == ""
    assert worker.call("add", 1, 2) == 3
    assert {"native", "of a child"} <= set(worker.log())


def test_worker_exceptions_are_raised_in_parent(worker):
    with pytest.raises(ProviderError, match="wrong") as caught:
        worker.call("raise", "ours")
    assert caught.value.nodes[0].refusals[0].provider == "C"
    with pytest.raises(FileNotFoundError) as missing:
        worker.call("raise", "system", timeout=SECONDS)
    assert missing.value.filename == "x"
    with pytest.raises(TimeoutError, match="t"):
        worker.call("raise", "time", timeout=SECONDS)
    with pytest.raises(PartitaError, match="internal error: OddError: a"):
        worker.call("raise", "odd")
    with pytest.raises(KeyError):
        worker.call("no such verb")
    with pytest.raises(Exception, match="pickle"):
        worker.call("unpicklable")
    assert worker.call("add", 1) == 1


def test_events_come_in_order():
    events: list[Any] = []
    with Worker(MODULE, on_event=events.append) as worker:
        worker.send("push", *range(1000))
        assert worker.call("add") == 0
        assert events == list(range(1000))


@pytest.mark.parametrize(
    ("how", "words", "number"),
    [
        ("SIGSEGV", "was killed by SIGSEGV; last line: last words", signal.SIGSEGV),
        ("SIGKILL", r"was killed by SIGKILL \(probably out of memory\)", signal.SIGKILL),
        (7, "ended with exit code 7; last line: last words", None),
    ],
)
def test_worker_exit_raises_error_in_running_and_later_calls(how, words, number):
    lost: list[Any] = []
    with Worker(MODULE, on_lost=lost.append) as worker:
        waiting = worker.submit("end", how)
        with pytest.raises(WorkerLostError, match=words) as caught:
            worker.wait(waiting)
        assert caught.value.signal == number and not caught.value.late and caught.value.exit_code == 3
        assert caught.value.out_of_memory == (how == "SIGKILL")
        for again in (lambda: worker.call("add"), lambda: worker.send("push", 1)):
            with pytest.raises(WorkerLostError, match=words):
                again()
    assert lost == [caught.value]


def test_call_timeout_ends_worker_and_its_children(worker):
    other = worker.call("start")
    with pytest.raises(WorkerLostError, match="gave no answer within 0.5 s") as caught:
        worker.call("sleep", 600, timeout=0.5)
    assert caught.value.late
    wait_until(lambda: is_gone(other))
    assert is_gone(worker.process.pid)


def test_close_ends_running_and_later_calls(worker, monkeypatch):
    monkeypatch.setattr("partita.runtime.worker.parent.END_SECONDS", 0.2)
    waiting = worker.submit("sleep", 600)
    worker.close()
    with pytest.raises(WorkerLostError, match="was closed") as caught:
        worker.wait(waiting)
    assert caught.value.closed
    with pytest.raises(WorkerLostError, match="was closed"):
        worker.call("add")


def test_interrupt_raises_keyboard_interrupt_only_in_running_call(worker):
    worker.interrupt()  # nothing is being done
    assert worker.call("add") == 0
    for seconds in (0, 0.3):  # before the handler runs, and while it does
        waiting = worker.submit("sleep", 600)
        time.sleep(seconds)
        worker.interrupt()
        with pytest.raises(KeyboardInterrupt):
            worker.wait(waiting)
    assert worker.call("add") == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_process_cannot_call_or_close_worker(worker):
    child = os.fork()
    if not child:
        try:
            worker.call("add")
        except GenerationError:
            worker.close()
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert worker.call("add", 1) == 1


# Work that may never end, and the thread that waits for it
