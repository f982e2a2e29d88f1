"""The server process: its socket, its connections and its end.

SIGTERM, SIGHUP and Ctrl-C drain: no request is accepted any more, open ones are answered. The second signal ends at
once, unless it follows within the time in which a terminal and its shell send the same one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from partita.errors import INTERRUPTED, ResourceError, UsageError
from partita.observations.text_format import plural
from partita.remedies import Remedy
from partita.serve.app import Endpoints
from partita.serve.gate import Gate
from partita.signals import PRESSED_SECONDS, TOGETHER_SECONDS

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection: the side that closes first loses no request."""
STALLED_SECONDS = 75
"""A client that reads nothing of its answer for so long is disconnected, where the system has TCP_USER_TIMEOUT."""
LAST_SECONDS = 1.0
"""For errors to be sent at an end that does not wait."""
MOST_DESCRIPTORS = 65536
SPARE_DESCRIPTORS = 64
"""For files that the process opens later."""
SPARE_CONNECTIONS = 4
"""For `/health` and `/metrics` when as many requests are open as descriptors allow."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
ANOTHER_PORT = Remedy("choose another one, or 0 for any that is free", options=("--port", "{port}"))
OTHER_HOST = Remedy("name an address of this machine", options=("--host", "127.0.0.1"))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. `port` 0: any free one.

    Raises UsageError for an unknown host, ResourceError for a port that is in use or not permitted.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"`host={host}`: {said}", remedy=OTHER_HOST) from error
    # IPv4 for a name with both, as localhost: not all clients try both.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listening = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers have one port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_SECONDS * 1000)
        listening.bind(address)
        listening.listen(BACKLOG)  # the port is taken only now: two sockets can be bound while neither listens
    except OSError as error:
        listening.close()
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(f"{where}: the port is in use", remedy=ANOTHER_PORT.filled(port=port + 1)) from error
        if error.errno == errno.EACCES:
            remedy = ANOTHER_PORT.filled(port=8000)
            raise ResourceError(f"{where}: this user may not open the port", remedy=remedy) from error
        raise UsageError(f"`host={host}`: {error.strerror or error}", remedy=OTHER_HOST) from error
    return listening


def url_of(listening: socket.socket) -> str:
    """The address of a socket as clients write it."""
    host, port, *_ = listening.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    host = str(listening.getsockname()[0])
    return host == "::1" or host.startswith("127.")


def free_descriptors() -> int:
    """Raise the soft limit of open files; the number of them that connections may use."""
    try:
        import resource
    except ImportError:  # Windows, where sockets are no descriptors
        return MOST_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if 0 <= soft < most:  # else unlimited or more
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(16, most - len([*Path("/dev/fd").iterdir()]) - SPARE_DESCRIPTORS)


class Connections:
    """Open connections. Beyond `most` the oldest one without an open request is closed for a new one."""

    def __init__(self, gate: Gate, most: int) -> None:
        self._gate, self.most = gate, most
        self._open: dict[Any, asyncio.Transport] = {}
        """By the address of the client, oldest first."""

    def add(self, peer: object, transport: asyncio.Transport) -> None:
        """Note a connection that was opened."""
        if len(self._open) >= self.most:
            idle = next((each for each in self._open if each not in self._gate.clients), None)
            (transport if idle is None else self._open.pop(idle)).abort()
        self._open[peer] = transport

    def remove(self, peer: object) -> None:
        """Forget a connection that was closed."""
        self._open.pop(peer, None)

    def abort(self) -> None:
        """Close all of them, whatever is still to be sent."""
        for transport in list(self._open.values()):
            transport.abort()


def connection_class(connections: Connections) -> type[asyncio.Protocol]:
    """uvicorn's protocol with a limit of connections. Only methods of asyncio.Protocol are overridden."""

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            host, port, *_ = transport.get_extra_info("peername") or ("", 0)
            self.peer = host, port  # as `scope["client"]` has it
            connections.add(self.peer, transport)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.remove(self.peer)
            super().connection_lost(exc)

    return Connection


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class Server:
    """The server. `run` it in any thread; `end` it from any thread, or by a signal."""

    def __init__(
        self,
        gate: Gate,
        app: Callable[..., Any],
        endpoints: Endpoints,
        listening: socket.socket,
        *,
        ready: Callable[[], object],
        log: Callable[[str], object],
    ) -> None:
        """`app` leads to `gate`, and `gate` to `endpoints`. `ready` is called when clients are accepted; `log` writes
        a line for the operator.
        """
        self._endpoints, self._gate, self._listening = endpoints, gate, listening
        self._ready, self._log = ready, log
        descriptors = free_descriptors()
        # Some more connections than are counted may be on their way: asyncio accepts a whole backlog at once.
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
        """Serve until the end; the exit code: 0 after SIGTERM and SIGHUP, 130 after Ctrl-C."""
        with suppress(KeyboardInterrupt):
            asyncio.run(self._serve())
        return INTERRUPTED if self.number == signal.SIGINT else 0

    def end(self, number: int) -> None:
        """Drain as after this signal; the second time, end at once."""
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
        with suppress(Exception):
            self._log(f"{context['message']}: {context.get('exception')}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals in this block, except for those that are ignored, as SIGHUP is under nohup."""
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
        """End, unless the signal follows another one so soon that it is the same."""
        now = time.monotonic()
        if now - self._signalled_at >= (PRESSED_SECONDS if number == signal.SIGINT else TOGETHER_SECONDS):
            self._signalled_at = now
            self.end(number)

    def _end(self, number: int) -> None:
        if self.number is not None:
            self._end_now()
            return
        self.number = number
        self._endpoints.draining = self._http.should_exit = True  # first, as writing the line may fail
        limits = self._endpoints.limits
        limit = limits.seconds if limits.drain_seconds is None else limits.drain_seconds
        asyncio.get_running_loop().call_later(limit, self._end_now)
        answered = f"{plural(self._gate.open, 'open request')} {'is' if self._gate.open == 1 else 'are'} answered"
        self._log(f"{signal.Signals(number).name}: ending; {answered}, unless it comes again")

    def _end_now(self) -> None:
        """End open answers with an error, then every connection: a client may read nothing."""
        self._endpoints.end_all()
        asyncio.get_running_loop().call_later(LAST_SECONDS, self._force)

    def _force(self) -> None:
        self._connections.abort()
        self._http.force_exit = True
