"""A served package whose worker process is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from partita.errors import ProviderError
from tests.serve.serving import COMPLETION, LONG, SECONDS, Running, running, until


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
