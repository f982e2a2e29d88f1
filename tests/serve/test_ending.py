"""How a server ends: when nobody can be told, when signals come together, and when a step does not end."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from partita.commands import serve
from partita.errors import ProviderError
from partita.library.batch import Batch
from partita.runtime import in_time
from partita.serve.gate import ServerLimits
from partita.serve.run import Server, bind
from tests.serve.serving import SECONDS, Running, running, until
from tests.serve.test_command import Command, serving
from tests.serve.test_load import COMPLETION, LONG

SLOW = """
import os, time
from partita.library.batch import Batch
step = Batch.step
def slowly(self):
    if os.path.exists(os.environ["SLOW"]):
        time.sleep(float(os.environ["SECONDS"]))
    return step(self)
Batch.step = slowly
from partita.cli import main
main()
"""
"""Steps take a while once a file is there: the first run is not to."""


LEFT = "tiny: a step, a report or a tokenization does not end, and is left where it is"


class Broken(io.StringIO):
    """A stream that takes nothing: of a terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [Broken, closed])
def test_a_stderr_that_takes_nothing_is_no_error(
    monkeypatch: pytest.MonkeyPatch, stream: Callable[[], io.StringIO]
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    for _ in range(3):
        serve._say_line("a line for the operator")
    kept = io.StringIO()
    monkeypatch.setattr(sys, "stderr", kept)
    serve._say_line("the next\none")
    assert kept.getvalue() == "partita: the next one\n", "what could not be said is not said later"


def untold(line: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_end_is_as_it_should_be_when_nobody_can_be_told_of_it(package: Path) -> None:
    with running({"tiny": package}) as ending, ending.slowly(), ThreadPoolExecutor(8) as pool:
        open_ones = [pool.submit(ending.post, COMPLETION, LONG) for _ in range(8)]
        until(lambda: ending.models["tiny"].open == 8)
        ending.server._log = untold
        ending.server.end(signal.SIGTERM)
        assert all(answer.result().status_code == 200 for answer in open_ones)
        assert ending.endpoints.draining and ending.server._http.should_exit


def test_a_run_that_fails_is_told_to_the_client_when_the_operator_cannot_be(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running({"tiny": package}, ServerLimits(seconds=20)) as server:
        served = server.models["tiny"]

        def fails(*_: Any) -> Any:
            raise ProviderError("the child process crashed", where=Path("/srv/model"))

        monkeypatch.setattr(served, "_log", untold)
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "step", fails)
            answer = server.post(COMPLETION, LONG)
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "The child process crashed.")
        assert server.post(COMPLETION, LONG).status_code == 200, "the thread that steps goes on"


def test_a_terminal_that_is_closed_changes_nothing_of_the_end(package: Path, tmp_path: Path) -> None:
    master, slave = os.openpty()
    (slow := tmp_path / "slow").touch()
    with slow_server(package, slow, 0.01, stderr=slave) as command, ThreadPoolExecutor(8) as pool:
        os.close(slave)
        answers = [pool.submit(command.post, LONG) for _ in range(8)]
        until(lambda: at_work(command) == 8)
        os.close(master)
        command.process.send_signal(signal.SIGHUP)
        assert all(answer.result().json()["usage"]["completion_tokens"] == 120 for answer in answers)
        assert command.process.wait(SECONDS) == 0


def slow_server(package: Path, slow: Path, seconds: float, *arguments: object, **options: Any) -> Any:
    environment: dict[str, Any] = {"SLOW": str(slow), "SECONDS": str(seconds)}
    return serving(package, "-e", "cpu", "--threads", 1, *arguments, program=("-c", SLOW), **environment, **options)


def at_work(command: Command) -> int:
    """Prompts that wait or have a row."""
    lines = httpx.get(f"{command.told['url']}/metrics", timeout=SECONDS).text.splitlines()
    wanted = ("partita_slots_running{", "partita_queue_waiting{")
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(wanted))


@pytest.mark.heavy
def test_a_terminal_and_its_shell_send_one_signal(package: Path, tmp_path: Path) -> None:
    (slow := tmp_path / "slow").touch()
    with slow_server(package, slow, 0.01) as command, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(command.post, LONG) for _ in range(8)]
        until(lambda: at_work(command) == 8)
        command.process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        code, err = command.end(signal.SIGHUP)
        assert all(answer.result().json()["usage"]["completion_tokens"] == 120 for answer in answers)
        assert code == 0 and err.count("SIGHUP: ending") == 1


def test_which_signals_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ended = [1000.0], list[int]()
    gate: Any = SimpleNamespace(most=1024)
    with bind("127.0.0.1", 0) as listening:
        server = Server(
            gate,
            gate,
            None,  # type: ignore[arg-type]
            listening,
            ready=print,
            log=print,
            together_seconds=serve._together_seconds,
        )
    monkeypatch.setattr(server, "end", ended.append)
    monkeypatch.setattr("partita.serve.run.time.monotonic", lambda: now[0])
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        with server._signals():
            for number, seconds in (
                (signal.SIGTERM, 0.0),
                (signal.SIGHUP, 1.0),  # the same, from the shell
                (signal.SIGINT, 1.0),  # somebody has no patience
                (signal.SIGINT, 0.1),  # pressed once, passed on by another process
                (signal.SIGINT, 1.0),
                (signal.SIGTERM, 5.0),
            ):
                now[0] += seconds
                signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == [signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for at the end comes at once, or never; nothing of it is left for other tests."""
    monkeypatch.setattr("partita.serve.served.END_SECONDS", 0.3)
    monkeypatch.setattr("partita.runtime.in_time.STOP_SECONDS", 0.1)
    monkeypatch.setattr("partita.runtime.worker.parent.END_SECONDS", 0.3)
    monkeypatch.setattr("partita.runtime.in_time._left", [])


def stopped(server: Running) -> bool:
    """Whether its package is stopped in a moment."""
    stopping = threading.Thread(target=server.models["tiny"].stop, daemon=True)
    stopping.start()
    stopping.join(10)
    return not stopping.is_alive()


def check_left(server: Running, pool: ThreadPoolExecutor, begun: threading.Event, goes_on: threading.Event) -> None:
    """A server that is ended once a request has `begun` what takes until `goes_on` ends, and leaves that behind."""
    answer = pool.submit(server.post, COMPLETION, LONG)
    try:
        assert begun.wait(SECONDS)
        server.server.end(signal.SIGTERM)
        assert answer.result().status_code == 503
        assert stopped(server) and in_time.left()
        assert server.log[-1] == LEFT
    finally:
        goes_on.set()


def test_a_step_that_does_not_end_is_left(package: Path, monkeypatch: pytest.MonkeyPatch, hasty: None) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    with running({"tiny": package}, ServerLimits(drain_seconds=0)) as server, ThreadPoolExecutor(1) as pool:
        served = server.models["tiny"]
        step = Batch.step

        def stuck(batch: Batch) -> Any:
            begun.set()
            assert goes_on.wait(SECONDS)
            return step(batch)

        monkeypatch.setattr(Batch, "step", stuck)
        check_left(server, pool, begun, goes_on)
        served._thread.join(SECONDS)
        assert not served._thread.is_alive()


def test_a_prompt_whose_reading_does_not_end_is_left(
    package: Path, monkeypatch: pytest.MonkeyPatch, hasty: None
) -> None:
    """Python waits for the thread at its end, unless it is told not to."""
    begun, goes_on = threading.Event(), threading.Event()
    with running({"tiny": package}, ServerLimits(drain_seconds=0)) as server, ThreadPoolExecutor(1) as pool:

        def stuck(prompt: str) -> list[int]:
            begun.set()
            assert goes_on.wait(SECONDS)
            return [1]

        monkeypatch.setattr(server.models["tiny"].reading.text, "encode", stuck)
        check_left(server, pool, begun, goes_on)


def test_a_process_that_does_not_answer_is_ended(package: Path, hasty: None) -> None:
    limits = ServerLimits(drain_seconds=0)
    with running({"tiny": package}, limits, process="child") as server, ThreadPoolExecutor(1) as pool:
        (child,) = [each for each in psutil.Process().children() if "partita.library.engine_process" in each.cmdline()]
        try:
            child.suspend()
            answer = pool.submit(server.post, COMPLETION, LONG)
            until(lambda: server.models["tiny"].open == 1)
            server.server.end(signal.SIGTERM)
            assert answer.result().status_code == 503
            assert stopped(server) and not in_time.left()
            assert not child.is_running() and not server.models["tiny"]._thread.is_alive()
        finally:
            if child.is_running():
                child.resume()


def test_the_command_ends_beside_a_step_that_does_not(package: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    with slow_server(package, slow, 600, "--drain-timeout", 0) as command, ThreadPoolExecutor(1) as pool:
        slow.touch()
        answer = pool.submit(command.post, LONG)
        until(lambda: at_work(command) == 1)
        began = time.monotonic()
        code, err = command.end(signal.SIGTERM)
        assert answer.result().status_code == 503
        assert code == 0 and "is left where it is" in err and "Traceback" not in err
        assert time.monotonic() - began < 20
