"""Server shutdown: open requests, signals, unwritable stderr, and steps that do not return."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.serve.serving import COMPLETION, LONG, SECONDS, running, until
from tests.serve.test_command import Command, serving

SLOW = """
import os, time
from partita.runtime.generate.loop import GenerationLoop
step = GenerationLoop.step
def slowly(self):
    if os.path.exists(os.environ["SLOW"]):
        time.sleep(float(os.environ["SECONDS"]))
    return step(self)
GenerationLoop.step = slowly
from partita.serve import served_package
served_package.END_SECONDS = 1.0
from partita.cli import main
main()
"""
"""Steps take a while once a file exists: the request at the start is not slowed down."""


@pytest.mark.parametrize("stream", [False, True])
def test_shutdown_completes_open_requests(package: Path, stream: bool) -> None:
    with running({"tiny": package}) as ending, ending.slowly(0.003), ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(ending.post, COMPLETION, {**LONG, "stream": stream}) for _ in range(8)]
        until(lambda: ending.models["tiny"].open_prompts == 8)
        ending.server.end("SIGTERM")
        answers = [entry.result() for entry in pending]
    assert all(answer.status_code == 200 for answer in answers)
    if stream:
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    else:
        assert all(answer.json()["usage"]["completion_tokens"] == 120 for answer in answers)
    ending.server.end("SIGTERM")  # after the end nothing happens


def test_shutdown_with_zero_drain_timeout_returns_503(package: Path) -> None:
    with running({"tiny": package}, drain_timeout=0) as ending, ending.slowly(), ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(ending.post, COMPLETION, LONG) for _ in range(8)]
        until(lambda: ending.models["tiny"].open_prompts == 8)
        ending.server.end("SIGTERM")
        answers = [entry.result() for entry in pending]
    cut = [answer for answer in answers if answer.status_code == 503]
    assert cut and all(answer.json()["error"]["code"] == "shutting_down" for answer in cut)
    assert len(cut) + sum(answer.status_code == 200 for answer in answers) == 8


def slow_server(package: Path, slow: Path, seconds: float, *arguments: object, **options: Any) -> Any:
    environment: dict[str, Any] = {"SLOW": str(slow), "SECONDS": str(seconds)}
    return serving(package, "-e", "cpu", "--threads", 1, *arguments, program=("-c", SLOW), **environment, **options)


def at_work(command: Command) -> int:
    """Prompts that wait or have a row."""
    lines = httpx.get(f"{command.told['url']}/metrics", timeout=SECONDS).text.splitlines()
    wanted = ("partita_slots_running{", "partita_queue_waiting{")
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(wanted))


def test_repeated_sighup_counts_as_a_single_shutdown_signal(package: Path, tmp_path: Path) -> None:
    master, slave = os.openpty()
    (slow := tmp_path / "slow").touch()
    with slow_server(package, slow, 0.01, stderr=slave) as command, ThreadPoolExecutor(8) as pool:
        os.close(slave)
        answers = [pool.submit(command.post, LONG) for _ in range(8)]
        until(lambda: at_work(command) == 8)
        os.close(master)
        command.process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        command.process.send_signal(signal.SIGHUP)
        assert all(answer.result().json()["usage"]["completion_tokens"] == 120 for answer in answers)
        assert command.process.wait(SECONDS) == 0


def test_second_ctrl_c_cancels_open_requests_with_503(package: Path, tmp_path: Path) -> None:
    (slow := tmp_path / "slow").touch()
    with slow_server(package, slow, 0.1) as command, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(command.post, LONG) for _ in range(8)]
        until(lambda: at_work(command) == 8)
        command.process.send_signal(signal.SIGINT)
        time.sleep(1.0)  # a repetition at once counts as the same signal
        code, err = command.end(signal.SIGINT)
        assert [answer.result().status_code for answer in answers] == [503] * 8
    assert code == 130 and err.count("SIGINT: shutting down") == 1 and "Traceback" not in err


def test_command_exits_while_a_step_is_stuck(package: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    with slow_server(package, slow, 600, "--drain-timeout", 0) as command, ThreadPoolExecutor(1) as pool:
        slow.touch()
        answer = pool.submit(command.post, LONG)
        until(lambda: at_work(command) == 1)
        began = time.monotonic()
        code, err = command.end(signal.SIGTERM)
        assert answer.result().status_code == 503
        assert code == 0 and "and was abandoned" in err and "Traceback" not in err
        assert time.monotonic() - began < 20
