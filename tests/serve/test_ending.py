"""Server shutdown and killed workers: open requests, signals, unwritable stderr, and steps that do not return."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from partita.errors import ProviderError
from tests.serve.serving import COMPLETION, LONG, SECONDS, Running, running, until
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


# A served package whose worker process is killed


@pytest.fixture(scope="module")
def apart(package: Path) -> Iterator[Running]:
    """A server whose package is in a worker process."""
    with running({"tiny": package}, process="child") as server:
        yield server


def worker(server: Running) -> psutil.Process:
    engine: Any = server.models["tiny"]._engine
    return psutil.Process(engine._worker.process.pid)


def is_well(server: Running) -> bool:
    return server.post(COMPLETION, LONG).status_code == 200 and server.get("/health").status_code == 200


def streamed(server: Running, after: int) -> list[dict[str, Any]]:
    """Events of a stream, whose worker is killed after so many of them."""
    events: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{server.url}{COMPLETION}", json={**LONG, "stream": True}, timeout=SECONDS) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if len(events) == after:
                    worker(server).kill()
            assert line != "data: [DONE]" or "error" not in events[-1]
    return events


def test_killed_worker_ends_stream_with_error_and_restarts(apart: Running) -> None:
    for _ in range(20):  # a fast worker may have sent everything before it is killed
        events = streamed(apart, 1)
        assert is_well(apart)
        if "error" in events[-1]:
            break
    error = events[-1]["error"]
    assert (error["code"], error["type"], error["param"]) == ("generation_failed", "server_error", None)
    assert "worker process" in error["message"] and len(events) > 1
    assert any("being restarted" in line for line in apart.log)


def test_waiting_requests_complete_after_worker_is_killed(apart: Running) -> None:
    with ThreadPoolExecutor(24) as pool:
        worker(apart).suspend()
        answers = [pool.submit(apart.post, COMPLETION, LONG) for _ in range(24)]
        until(lambda: apart.models["tiny"].open_prompts == 24)
        worker(apart).kill()
        statuses = [answer.result().status_code for answer in answers]
    assert statuses == [200] * 24, "none of them had a row"
    until(lambda: apart.is_idle)
    assert apart.metric("partita_model_up") == 1


def test_reload_over_placement_limits_is_down_until_retry_succeeds(
    apart: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retries by itself: load balancers send no requests to a server with /health 503."""
    monkeypatch.setattr("partita.library.engine.remote.RETRY_SECONDS", 0.2)
    served = apart.models["tiny"]
    before = served._metrics.reports["tiny"]
    with monkeypatch.context() as patch:
        over = ProviderError("5 nodes are elsewhere", path=Path("/srv/secret"))
        patch.setattr("partita.serve.served_package.limits_error", lambda report: over)
        worker(apart).kill()
        until(lambda: apart.get("/health").json()["down"] == ["tiny"])
        answer = apart.post(COMPLETION, LONG)
        assert answer.status_code == 500 and "5 nodes are elsewhere" in answer.text and "/srv" not in answer.text
        assert apart.metric("partita_model_up") == 0
    until(lambda: apart.get("/health").status_code == 200)
    assert is_well(apart)
    assert served._metrics.reports["tiny"] is not before
    assert "created when the model was reloaded" in apart.get("/report").text


def test_suspended_worker_is_ended_with_the_server(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.serve.served_package.END_SECONDS", 0.3)
    monkeypatch.setattr("partita.runtime.worker.parent.END_SECONDS", 0.3)
    with running({"tiny": package}, process="child") as server, ThreadPoolExecutor(1) as pool:
        process = worker(server)
        process.suspend()
        answer = pool.submit(server.post, COMPLETION, LONG)
        until(lambda: server.models["tiny"].open_prompts == 1)
        server.server.end("SIGTERM")
        server.server.end("SIGTERM")
        assert answer.result().status_code == 503
        server.models["tiny"].stop()
        assert not process.is_running()
