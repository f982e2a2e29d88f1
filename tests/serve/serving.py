"""A server in this process, in a thread of its own, and what tests ask it with."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from partita.library.chain import read_chain
from partita.options.generation import ServeCommand
from partita.options.groups import Process
from partita.package.folder import read_manifest
from partita.serve.metrics import Metrics
from partita.serve.run import Server, bind, url_of
from partita.serve.served_package import ServedPackage

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"model": "tiny", "prompt": "return", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
SECONDS = 60.0
"""Longest wait for what takes a moment."""
SYSTEM = "return the value of the item in the list"


class Running:
    """A server that listens."""

    def __init__(self, url: str, server: Server, models: dict[str, ServedPackage], log: list[str]) -> None:
        self.url, self.server, self.models, self.log = url, server, models, log

    @contextmanager
    def slowly(self, seconds: float = 0.01) -> Iterator[None]:
        """Every step takes so long: these models are done before a test could come between."""
        with pytest.MonkeyPatch.context() as patch:
            for served in self.models.values():
                patch.setattr(served._engine, "step", partial(_after, seconds, served._engine.step))
            yield

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def is_idle(self) -> bool:
        return all(served.open_prompts == 0 for served in self.models.values())

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=SECONDS, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=SECONDS, **options)

    def metric(self, name: str, **labels: str) -> float:
        """A value of /metrics; labels are those of the first model where none is given."""
        wanted = labels or {"model": next(iter(self.models))}
        for line in self.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(f'{key}="{each}"' in head for key, each in wanted.items()):
                return float(value)
        raise AssertionError(f"no metric {name} {labels}")


@contextmanager
def running(
    packages: dict[str, Path], *, process: Process = "this", prefix: Path | None = None, **options: Any
) -> Iterator[Running]:
    """A server of these packages on a free port. `options`: those of the command."""
    metrics, listens = Metrics(), threading.Event()
    given = ServeCommand(packages=[*packages.values()], providers="cpu", threads=1, **options)
    target = read_chain(given)
    with ExitStack() as stack:
        listening = stack.enter_context(bind("127.0.0.1", 0))
        log: list[str] = []
        models = {}
        for name, package in packages.items():
            common = (read_manifest(package), target, given, metrics)
            models[name] = ServedPackage(name, package, *common, log=log.append, prefix=prefix, process=process)
            stack.callback(models[name].stop)
        server = Server(models, given, metrics, listening, ready=listens.set, log=log.append)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        assert listens.wait(SECONDS)
        found = Running(url_of(listening), server, models, log)
        try:
            yield found
        finally:
            server.end("SIGTERM")
            thread.join(SECONDS)
            if thread.is_alive():
                server.end("SIGTERM")
                thread.join(SECONDS)
            assert not thread.is_alive()


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def _after(seconds: float, step: Callable[[], bool]) -> bool:
    time.sleep(seconds)
    return step()


def request_bytes(path: str, body: Any) -> bytes:
    """A POST as it is on the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def raw(address: tuple[str, int]) -> socket.socket:
    """A connection without a client library."""
    return socket.create_connection(address, timeout=SECONDS)
