"""The server process: its socket and shutdown.

SIGTERM, SIGHUP and Ctrl-C drain: new requests are rejected, open requests are completed. The second signal ends the
server at once, unless it follows so soon that a terminal and its shell may have sent the same signal twice.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from partita.errors import INTERRUPTED, ResourceError, UsageError
from partita.observations.text_format import plural
from partita.options.generation import ServeCommand
from partita.remedies import Remedy
from partita.serve.app import App
from partita.serve.metrics import Metrics
from partita.serve.served_package import ServedPackage
from partita.signals import TerminatedError

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Seconds; longer than clients keep an idle connection, because the side that closes first loses no request."""
STALLED_SECONDS = 75
"""Seconds after which a client that reads nothing is disconnected, on systems with TCP_USER_TIMEOUT."""
LAST_SECONDS = 1.0
"""Seconds for sending errors when the server ends at once."""
MOST_DESCRIPTORS = 65536
SPARE_CONNECTIONS = 4
"""Connections reserved for `/health` and `/metrics`."""
POLL_SECONDS = 0.5
"""Windows does not interrupt a wait for Ctrl-C."""
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


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit; return it, at most `MOST_DESCRIPTORS`."""
    try:
        import resource
    except ImportError:  # Windows, where sockets are no descriptors
        return MOST_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if 0 <= soft < most:  # otherwise unlimited or more
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def limited_protocol(most: int) -> type[H11Protocol]:
    """uvicorn's protocol, with at most so many connections: a new one then closes the oldest without a request."""

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.began = time.monotonic()
            if len(self.connections) > most:
                every = (each for each in self.connections if isinstance(each, Connection) and each.is_idle)
                min(every, key=lambda each: each.began, default=self).transport.abort()

        @property
        def is_idle(self) -> bool:
            return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    return Connection


class Server(uvicorn.Server):
    """The server. `run_until_signal` it in the main thread; `end` it from any thread."""

    def __init__(
        self,
        models: Mapping[str, ServedPackage],
        options: ServeCommand,
        metrics: Metrics,
        listening: socket.socket,
        *,
        ready: Callable[[], object],
        log: Callable[[str], object],
    ) -> None:
        """`models`: by name. `ready` is called when clients are accepted, `log` with a line for the operator."""
        self._options, self._listening, self._ready, self._log = options, listening, ready, log
        descriptors = raise_descriptor_limit()
        most = min(options.max_requests, descriptors // 2 - SPARE_CONNECTIONS)
        self.app = App(models, options, metrics, most=most, log=log)
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                self.app.guarded(options.host if is_loopback(listening) else None),
                http=limited_protocol(descriptors // 2),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level=logging.CRITICAL + 1,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=max(4, min(BACKLOG, descriptors // 10)),  # asyncio accepts all of it at once
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )

    def run_until_signal(self) -> int:
        """Serve in another thread until shutdown; return the exit code: 0 after SIGTERM and SIGHUP, 130 after Ctrl-C.

        `signals.ended_by_exception` drops repeated signals.
        """
        code: int | None = None
        with ThreadPoolExecutor(1, "server") as pool:
            serving = pool.submit(self.run, [self._listening])
            try:
                while not serving.done():
                    try:
                        wait([serving], timeout=POLL_SECONDS)
                    except KeyboardInterrupt:
                        code = INTERRUPTED if code is None else code
                        self.end("SIGINT")
                    except TerminatedError as error:
                        code = 0 if code is None else code
                        self.end(error.name)
            except BaseException:  # a signal between two waits
                self.app.draining = self.should_exit = True
                raise
            serving.result()
        return code or 0

    def end(self, signal_name: str) -> None:
        """Drain: reject new requests and complete open ones. The second call ends the server at once."""
        if self.should_exit and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._end_now)
        elif not self.should_exit:
            self.app.draining = self.should_exit = True
            open_requests = plural(self.app.open_requests, "open request")
            self._log(f"{signal_name}: shutting down; waiting for {open_requests}; repeat the signal to stop now")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept clients."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _, found: self._log(f"{found['message']}: {found.get('exception')}"))
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Complete open requests within the limit."""
        options = self._options
        limit = options.timeout if options.drain_timeout is None else options.drain_timeout
        asyncio.get_running_loop().call_later(limit, self._end_now)
        await super().shutdown(sockets)

    def _end_now(self) -> None:
        """End open responses with an error, then close every connection, because a client may read nothing."""
        for task in self.server_state.tasks:
            task.cancel()
        asyncio.get_running_loop().call_later(LAST_SECONDS, self._abort)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
