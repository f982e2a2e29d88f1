"""The `partita serve` command: errors before it listens, its output, and shutdown by signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2 as httpx
import jsonschema
import psutil
import pytest

from partita.cli import run
from partita.serve.run import bind
from tests.commands.test_cli import heed
from tests.conftest import REPOSITORY
from tests.runtime.handmade_packages import handmade
from tests.serve.serving import COMPLETION, LONG, SECONDS, raw, request_bytes, running


class Command:
    """`partita serve` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], told: dict[str, Any]) -> None:
        self.process, self.told = process, told
        self.name = told["models"][0]["name"]

    def post(self, body: dict[str, Any]) -> httpx.Response:
        answer: httpx.Response = httpx.post(
            f"{self.told['url']}{COMPLETION}", json={**body, "model": self.name}, timeout=SECONDS
        )
        return answer

    def end(self, number: int) -> tuple[int, str]:
        """Its exit code and all that it said on stderr."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, err


def without_key() -> dict[str, str]:
    """The variables of this process without an API key: an empty one is an error."""
    return {name: value for name, value in os.environ.items() if name != "PARTITA_API_KEY"}


@contextmanager
def serving(
    *arguments: object, program: Sequence[str] = ("-m", "partita"), stderr: int = subprocess.PIPE, **environment: str
) -> Iterator[Command]:
    """The command, once it listens. `program`: what Python is told to run."""
    process = subprocess.Popen(
        [sys.executable, *program, "serve", *map(str, arguments), "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        preexec_fn=heed,
        env={**without_key(), "PYTHONPATH": str(REPOSITORY), **environment},
    )
    assert process.stdout is not None
    try:
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read() if process.stderr else ""
        yield Command(process, json.loads("".join(lines)))
    finally:
        process.kill()
        process.communicate()


def test_sigterm_completes_accepted_requests_and_exits_with_0(package, prefix):
    with serving(package, "--prefix", prefix, "--provider", "cpu", "--threads", 1) as command:
        schema = json.loads((REPOSITORY / "docs" / "serve.schema.json").read_text("utf-8"))
        jsonschema.validate(command.told, schema)
        assert command.told["models"] == [
            {"name": "package", "package": str(package), "slots": 4, "max_length": 128, "chat": True, "adapters": []}
        ]
        assert command.post(LONG).status_code == 200
        with ThreadPoolExecutor(40) as pool:
            answers = [pool.submit(command.post, LONG) for _ in range(40)]
            time.sleep(0.05)
            code, err = command.end(signal.SIGTERM)
            # Those that were taken are answered whole; the others never had a connection.
            outcomes = [entry.result() for entry in answers if entry.exception() is None]
        assert all(answer.json()["usage"]["completion_tokens"] == 120 for answer in outcomes if answer.is_success)
        assert all(answer.status_code in (200, 503) for answer in outcomes)
        assert code == 0 and "SIGTERM: shutting down" in err and "Traceback" not in err
        assert f"serving package on {command.told['url']}/v1" in err and "on CPU" in err
        assert f"tokens of {prefix} reuse its states" in " ".join(err.split())


@pytest.mark.heavy
def test_ctrl_c_exits_with_130_and_environment_key_is_required(package):
    with serving(package, "-e", "cpu", "--name", "m", PARTITA_API_KEY="secret") as command:
        assert command.post(LONG).status_code == 401
        models = httpx.get(f"{command.told['url']}/v1/models", headers={"authorization": "Bearer secret"})
        assert models.json()["data"][0]["id"] == "m"
        code, err = command.end(signal.SIGINT)
        assert code == 130 and "Traceback" not in err


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
from partita.cli import main
main()
"""


def test_connections_beyond_descriptor_limit_do_not_block_requests(package):
    with (
        serving(package, "--provider", "cpu", "--threads", 1, program=("-c", LIMITED)) as command,
        ExitStack() as stack,
    ):
        process, url = psutil.Process(command.process.pid), httpx.URL(command.told["url"])
        for number in range(400):
            stack.enter_context(raw((url.host, url.port or 0)))
            if number % 20 == 0:  # the server accepts those before: a full backlog makes the next one wait for seconds
                assert httpx.get(f"{command.told['url']}/health", timeout=SECONDS).status_code == 200
        before = sum(process.cpu_times()[:2])
        began = time.monotonic()
        for _ in range(5):
            assert httpx.get(f"{command.told['url']}/health", timeout=SECONDS).status_code == 200
            assert command.post(LONG).status_code == 200
        assert time.monotonic() - began < 20
        time.sleep(1)
        used = sum(process.cpu_times()[:2])
        time.sleep(2)
        assert sum(process.cpu_times()[:2]) - used < 0.5, f"idle, after {used - before} s for ten answers"
        code, err = command.end(signal.SIGTERM)
    assert code == 0 and "Traceback" not in err and len(err) < 4000


def fails(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """The last line of stderr of a command that does not begin to serve."""
    assert run(["serve", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return str(err.splitlines()[-1])


def test_used_port_is_reported_before_loading(package, capsys):
    """Of two servers started together the second fails at once, not after loading."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        line = fails(capsys, 1, package, "-e", "cpu", "--port", port)
        assert f"127.0.0.1:{port}: the port is in use" in line and f"--port {port + 1}" in line
        with raw(("127.0.0.1", port)):  # a client that comes early waits
            first.accept()[0].close()


def test_package_without_tokenizer_is_rejected(tmp_path, capsys):
    assert "has no tokenizer" in fails(capsys, 1, handmade(tmp_path / "p"), "--provider", "cpu", "--port", 0)


def test_package_without_chat_template_serves_only_completions(tmp_path):
    with running({"plain": handmade(tmp_path / "p", words=True)}) as server:
        body = {"model": "plain", "messages": [{"role": "user", "content": "w5"}]}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 400 and "/v1/completions" in answer.json()["error"]["message"]
        assert server.post(COMPLETION, {"model": "plain", "prompt": "w5"}).status_code == 200


@pytest.mark.heavy
def test_client_not_reading_its_response_does_not_block_shutdown(package):
    """A large response waits in the socket; without a limit for draining, shutdown never ended."""
    with serving(package, "--provider", "cpu", "--threads", 1, "--timeout", 12) as command:
        url = httpx.URL(command.told["url"])
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            stalled.connect((url.host, url.port))
            asked = {"model": command.name, "messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
            asked |= {"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 100}
            stalled.sendall(request_bytes("/v1/chat/completions", asked))
            time.sleep(9)  # it is answered, and the answer is larger than what sockets hold
            began = time.monotonic()
            code, err = command.end(signal.SIGTERM)
        assert code == 0 and "Traceback" not in err and time.monotonic() - began < 25


@pytest.mark.parametrize("key", ["", " "])
def test_empty_api_key_in_environment_is_rejected(key, package, monkeypatch, capsys):
    monkeypatch.setenv("PARTITA_API_KEY", key)
    assert run(["serve", str(package), "--port", "0"]) == 2
    assert "PARTITA_API_KEY is empty" in capsys.readouterr().err
