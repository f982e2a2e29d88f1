"""Between a command and a cluster: what answers at an address, and whether it is of this version. No cluster runs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from partita import __version__
from partita.errors import UsageError
from partita.library.cluster import setting_up
from partita.library.cluster.options import Means
from partita.library.cluster.setting_up import _check_probe, _found, _not_connected, connected, means_of
from tests.conftest import require

SECONDS = 30.0


def test_a_cluster_of_another_python_is_named_with_that_of_the_command():
    """In the words of the Ray that is installed."""
    require("ray")
    from ray._private.utils import check_version_info, compute_version_info

    ray, python = compute_version_info()
    for there in ((ray, "3.99.1"), ("1.0.0", python)):
        with pytest.raises(RuntimeError) as raised:
            check_version_info(
                {"ray_version": there[0], "python_version": there[1]}, "node 1.2.3.4", raise_on_mismatch=True
            )
        error = _not_connected("auto", raised.value)
        assert isinstance(error, UsageError) and "\n" not in str(error)
        assert f"it has Ray: {there[0]} Python: {there[1]}, and the command Ray: {ray} Python: {python}" in str(error)


@pytest.mark.parametrize(("there", "said"), [("0.0.0", "has Partita 0.0.0"), ("", "has no Partita")])
def test_a_worker_of_another_partita_is_refused(there, said):
    with pytest.raises(UsageError, match=f"/env/python on host {said}.*{__version__}"):
        _check_probe({"host": "host", "partita": there, "why": "No module named 'partita'"}, "/env/python")


def test_a_worker_of_the_same_partita_is_taken():
    _check_probe({"host": "host", "partita": __version__, "why": ""}, "/env/python")


class Page(BaseHTTPRequestHandler):
    """A web server that has nothing."""

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """HOST:PORT where somebody takes one connection, and does with it as `answer` does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            line, _ = server.accept()
            with line:
                answer(line)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(SECONDS)


def test_a_web_server_is_no_cluster():
    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(
            UsageError, match=f"--address {address}: what listens there is no cluster of Ray.*ray start"
        ):
            _found(address)
    finally:
        server.shutdown()
        server.server_close()


def test_who_listens_and_says_nothing_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr(setting_up, "LIVE_SECONDS", 0.2)
    gone = threading.Event()
    with listening(lambda line: gone.wait(SECONDS)) as address:
        with pytest.raises(UsageError, match=f"--address {address}: no cluster answers there .timed out"):
            _found(address)
        gone.set()


def test_who_says_a_byte_at_a_time_is_given_up_in_time_too(monkeypatch):
    monkeypatch.setattr(setting_up, "LIVE_SECONDS", 0.3)
    gone = threading.Event()

    def drip(line: socket.socket) -> None:
        while not gone.wait(0.2):
            line.sendall(b"\0")

    with listening(drip) as address:
        with pytest.raises(UsageError, match="no cluster answers there"):
            _found(address)
        gone.set()


GREETED = b"\0\0\0\4\0\0\0\0\0"


def test_who_speaks_as_ray_does_is_asked_which_cluster_it_is(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(setting_up, "_ask_head", asked.append)
    with listening(lambda line: line.sendall(GREETED + bytes(40))) as address:
        assert _found(address) == address == asked[0]


def test_a_head_that_answers_with_an_error_is_one_line(monkeypatch):
    def refuse(address: str) -> None:
        raise RuntimeError("RPC error:\n Deadline")

    monkeypatch.setattr(setting_up, "_ask_head", refuse)
    said = "no cluster answers there .RPC error: Deadline.*ray start"
    with listening(lambda line: line.sendall(GREETED)) as address, pytest.raises(UsageError, match=said) as raised:
        _found(address)
    assert "\n" not in str(raised.value)


def test_who_speaks_as_ray_does_and_says_no_more_is_given_up_in_time(monkeypatch):
    """Ray's own client waits for half a minute, and `ray.init` for many."""
    require("ray")
    monkeypatch.setattr(setting_up, "HEAD_SECONDS", 0.3)
    lines: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            with suppress(OSError):
                while True:
                    lines.append(server.accept()[0])
                    lines[-1].sendall(GREETED)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        began = time.monotonic()
        with pytest.raises(UsageError, match="it did not say within 0.3 s which cluster it is"):
            _found(f"127.0.0.1:{server.getsockname()[1]}")
        assert time.monotonic() - began < SECONDS and len(lines) > 1
        server.shutdown(socket.SHUT_RDWR)  # which ends the waiting for one more
        thread.join(SECONDS)
    for line in lines:
        line.close()


def test_an_address_of_the_environment_is_named_where_it_does_not_answer(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UsageError, match="--address auto: RAY_ADDRESS is 127.0.0.1:1: no cluster answers there"):
        _found("auto")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(UsageError, match="RAY_ADDRESS is ray://head:10001, and it has to be HOST:PORT"):
        _found("auto")


def test_no_cluster_at_all_and_one_that_is_gone_are_one_line(monkeypatch):
    require("ray")
    from ray._private import services

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    with pytest.raises(UsageError, match="--address auto: no cluster runs on this machine.*ray start --head"):
        _found("auto")
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: "127.0.0.1:1")
    with pytest.raises(UsageError, match=r"started last on this machine was at \S+:1: no cluster answers"):
        _found("auto")


def test_a_cluster_of_its_own_is_asked_for_by_name(monkeypatch):
    """Without an address Ray would join one that runs, or try one that RAY_ADDRESS has."""
    require("ray")
    import ray

    asked: list[dict[str, object]] = []
    monkeypatch.setattr(ray, "init", lambda **given: asked.append(given))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with connected("local"):
        assert asked[0]["address"] == "local"


def test_the_processors_of_each_machine_are_known_and_those_of_dead_ones_do_not_count():
    nodes = [
        {"Alive": True, "Resources": {"memory": 1.0}},
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
        {"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}},
    ]
    ray = SimpleNamespace(nodes=lambda: nodes, cluster_resources=lambda: {"CPU": 10.0, "GPU": 1.0})
    assert means_of(ray) == Means({"CPU": 10.0, "GPU": 1.0}, (0.0, 8.0, 2.0))
