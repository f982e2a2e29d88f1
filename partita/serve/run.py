"""The server process: its socket, connections and shutdown.

SIGTERM, SIGHUP and Ctrl-C drain: new requests are rejected, open requests are completed. The second signal ends the
server at once, unless it follows so soon that a terminal and its shell may have sent the same signal twice.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from partita.errors import INTERRUPTED, ResourceError, UsageError
from partita.observations.text_format import plural
from partita.options.generation import ServerLimits
from partita.remedies import Remedy
from partita.serve.app import Endpoints, Gate, guard_app, make_app
from partita.serve.metrics import Metrics
from partita.serve.served_package import ServedPackage
from partita.signals import PRESSED_SECONDS, TOGETHER_SECONDS

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Seconds; longer than clients keep an idle connection, because the side that closes first loses no request."""
STALLED_SECONDS = 75
"""Seconds after which a client that reads nothing is disconnected, on systems with TCP_USER_TIMEOUT."""
LAST_SECONDS = 1.0
"""Seconds for sending errors when the server ends at once."""
MOST_DESCRIPTORS = 65536
SPARE_DESCRIPTORS = 64
"""File descriptors reserved for files."""
SPARE_CONNECTIONS = 4
"""File descriptors reserved for `/health` and `/metrics`."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
ANOTHER_PORT = Remedy("choose another port, or 0 for any free port", options=("--port", "{port}"))
OTHER_HOST = Remedy("choose an address of this machine", options=("--host", "127.0.0.1"))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. `port` 0: any free port.

    Raises UsageError for an unknown host, ResourceError for a port that is in use or not permitted.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"`host={host}`: {reason}", remedy=OTHER_HOST) from error
    # IPv4 for a name with both, e.g. localhost, because not all clients try both.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        listening = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    except OSError as error:
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(f"{where}: the port is in use", remedy=ANOTHER_PORT.filled(port=port + 1)) from error
        if error.errno == errno.EACCES:
            remedy = ANOTHER_PORT.filled(port=8000)
            raise ResourceError(f"{where}: this user is not allowed to open the port", remedy=remedy) from error
        raise UsageError(f"`host={host}`: {error.strerror or error}", remedy=OTHER_HOST) from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_SECONDS * 1000)
    return listening


def url_of(listening: socket.socket) -> str:
    """The URL of a socket."""
    host, port, *_ = listening.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    host = str(listening.getsockname()[0])
    return host == "::1" or host.startswith("127.")


def free_descriptors() -> int:
    """Raise the soft limit of open files; return the number available for connections."""
    try:
        import resource
    except ImportError:  # Windows, where sockets are no descriptors
        return MOST_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if 0 <= soft < most:  # otherwise unlimited or more
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(16, most - len([*Path("/dev/fd").iterdir()]) - SPARE_DESCRIPTORS)


class Connections:
    """Open connections. Above `most`, the oldest connection without an open request is closed."""

    def __init__(self, gate: Gate, most: int) -> None:
        self._gate, self.most = gate, most
        self._open: dict[Any, asyncio.Transport] = {}
        """By client address, oldest first."""

    def add(self, peer: object, transport: asyncio.Transport) -> None:
        """Add an opened connection."""
        if len(self._open) >= self.most:
            idle = next((each for each in self._open if each not in self._gate.clients), None)
            (transport if idle is None else self._open.pop(idle)).abort()
        self._open[peer] = transport

    def remove(self, peer: object) -> None:
        """Remove a closed connection."""
        self._open.pop(peer, None)

    def abort(self) -> None:
        """Close all connections, discarding unsent data."""
        for transport in list(self._open.values()):
            transport.abort()


def connection_class(connections: Connections) -> type[asyncio.Protocol]:
    """uvicorn's protocol with a limit of connections. Overrides only methods of asyncio.Protocol."""

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            host, port, *_ = transport.get_extra_info("peername") or ("", 0)
            self.peer = host, port  # as in `scope["client"]`
            connections.add(self.peer, transport)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.remove(self.peer)
            super().connection_lost(exc)

    return Connection


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not change signal handlers."""
        yield


class Server:
    """The server. `run` it in any thread; `end` it from any thread, or by a signal."""

    def __init__(
        self,
        models: Mapping[str, ServedPackage],
        limits: ServerLimits,
        metrics: Metrics,
        listening: socket.socket,
        *,
        host: str = "127.0.0.1",
        keys: Sequence[str] = (),
        origins: Sequence[str] = (),
        ready: Callable[[], object],
        log: Callable[[str], object],
    ) -> None:
        """`models`: by name. `host`: the address of `listening` as the user named it. `keys`: accepted API keys; empty:
        none needed. `origins`: allowed origins of web pages. `ready` is called when clients are accepted, `log` with a
        line for the operator.
        """
        self.endpoints, self._listening = Endpoints(models, limits, metrics), listening
        self._gate = gate = Gate(make_app(self.endpoints), limits, metrics, keys, origins, log)
        app = guard_app(gate, origins, host if is_loopback(listening) else None)
        self._ready, self._log = ready, log
        descriptors = free_descriptors()
        # asyncio accepts a whole backlog at once, so there may be more connections than counted.
        self._connections = Connections(gate, descriptors // 2)
        gate.most = min(gate.most, max(1, self._connections.most - SPARE_CONNECTIONS))
        self._http = HttpServer(
            uvicorn.Config(
                app,
                http=connection_class(self._connections),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level=logging.CRITICAL + 1,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=max(4, min(BACKLOG, descriptors // 10)),
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signalled_at = -math.inf
        self.number: int | None = None
        """The signal that ended it."""

    def run(self) -> int:
        """Serve until shutdown; return the exit code: 0 after SIGTERM and SIGHUP, 130 after Ctrl-C."""
        with suppress(KeyboardInterrupt):
            asyncio.run(self._serve())
        return INTERRUPTED if self.number == signal.SIGINT else 0

    def end(self, number: int) -> None:
        """Drain as after this signal; the second call ends the server at once."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._end, number)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        with self._signals():
            serving = self._loop.create_task(self._http.serve([self._listening]))
            while not self._http.started and not serving.done():
                await asyncio.sleep(0.01)
            self._ready()
            await serving

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._log(f"{context['message']}: {context.get('exception')}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals in this block, except ignored signals, e.g. SIGHUP under nohup."""
        before = {}
        in_main = threading.current_thread() is threading.main_thread()
        for number in SIGNALS if in_main else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        """End, unless the signal follows another so soon that it is a duplicate."""
        now = time.monotonic()
        if now - self._signalled_at >= (PRESSED_SECONDS if number == signal.SIGINT else TOGETHER_SECONDS):
            self._signalled_at = now
            self.end(number)

    def _end(self, number: int) -> None:
        if self.number is not None:
            self._end_now()
            return
        self.number = number
        self.endpoints.draining = self._http.should_exit = True  # first, because writing the line may fail
        limits = self.endpoints.limits
        limit = limits.timeout if limits.drain_timeout is None else limits.drain_timeout
        asyncio.get_running_loop().call_later(limit, self._end_now)
        answered = f"waiting for {plural(self._gate.open_requests, 'open request')}"
        self._log(f"{signal.Signals(number).name}: shutting down; {answered}; repeat the signal to stop now")

    def _end_now(self) -> None:
        """End open responses with an error, then close every connection, because a client may read nothing."""
        self.endpoints.end_all()
        asyncio.get_running_loop().call_later(LAST_SECONDS, self._force)

    def _force(self) -> None:
        self._connections.abort()
        self._http.force_exit = True
