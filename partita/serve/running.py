"""The server process: its socket, its connections, and how it ends.

SIGTERM and Ctrl-C drain: no request is taken any more, those that were are answered. The second signal ends at once,
unless it comes together with the first: that is the same one, from a terminal and its shell.
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
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from partita.errors import INTERRUPTED, ResourceError, UsageError
from partita.observations.text_format import plural
from partita.remedies import Remedy
from partita.serve.answers import to_json
from partita.serve.api_errors import invalid
from partita.serve.app import Endpoints
from partita.spelling import spelled

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep a connection for the next request: one that closes first loses none."""
HEAD_SECONDS = 20.0
"""For the head of a request to arrive."""
LAST_SECONDS = 1.0
"""For errors to go out at an end that does not wait."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
ANOTHER_PORT = Remedy("choose another one, or 0 for any that is free", options=("--port", "{port}"))
OTHER_HOST = Remedy("name an address of this machine", options=("--host", "127.0.0.1"))


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine; who connects waits until a server takes it over. `port` 0:
    any free one.

    Raises UsageError for a host that is none, ResourceError for a port that is in use or not permitted.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{spelled('host', host)}: {said}", remedy=OTHER_HOST) from error
    # Of a name with both, as localhost: not all clients try both.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listening = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers have one port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)  # only then is the port taken: two may bind one while neither listens
    except OSError as error:
        listening.close()
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(f"{where}: the port is in use", remedy=ANOTHER_PORT.filled(port=port + 1)) from error
        if error.errno == errno.EACCES:
            remedy = ANOTHER_PORT.filled(port=8000)
            raise ResourceError(f"{where}: this user may not open the port", remedy=remedy) from error
        raise UsageError(f"{spelled('host', host)}: {error.strerror or error}", remedy=OTHER_HOST) from error
    return listening


def url_of(listening: socket.socket) -> str:
    """The address of a socket as clients write it."""
    host, port, *_ = listening.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    host = str(listening.getsockname()[0])
    return host == "::1" or host.startswith("127.")


class Connection(H11Protocol):
    """A connection of a client; it is dropped when the head of a request takes too long."""

    _head_timer: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes of an answer that the client had not read when that was looked at last."""

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        """A client has sent something."""
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """All of an answer was handed over; the client may not have read it yet."""
        super().on_response_complete()
        self._unread = self.transport.get_write_buffer_size()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for a while; a client that has read nothing of what is left for it meanwhile reads no more,
        and one that reads slowly has as long again.
        """
        left = self.transport.get_write_buffer_size()
        if not left:
            super().timeout_keep_alive_handler()
        elif left >= self._unread:
            self.transport.abort()
        else:
            self._unread = left
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def send_400_response(self, msg: str) -> None:
        """Tell that what came is no HTTP, in the format of all errors."""
        body = to_json(invalid(msg, code="invalid_http").body())
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    def _look(self) -> None:
        """Wait for the head of a request while none is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class _HttpServer(uvicorn.Server):
    """uvicorn's server, which says when it listens and leaves signals alone."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """The server process. `run` it in a thread of its own event loop; `end` it from any thread, or by a signal."""

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Endpoints,
        listening: socket.socket,
        *,
        ready: Callable[[], object],
        told: Callable[[str], object],
        together_seconds: Callable[[int], float] = lambda number: 0.0,
    ) -> None:
        """`ready` is called once clients are listened to; `told` hears lines for the operator. `together_seconds`: a
        signal that follows another one within that time, which its number tells, is no second one.
        """
        self._endpoints, self._listening, self._told = endpoints, listening, told
        self._http = _HttpServer(_config(app), ready)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._together_seconds, self._signalled_at = together_seconds, -math.inf
        self.number: int | None = None
        """The signal that it was told to end by."""

    def run(self) -> int:
        """Serve until it is told to end; the exit code: 0 after SIGTERM and SIGHUP, 130 after Ctrl-C."""
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
            logger = logging.getLogger(name)
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
        with suppress(KeyboardInterrupt):
            asyncio.run(self._serve())
        return INTERRUPTED if self.number == signal.SIGINT else 0

    def end(self, number: int) -> None:
        """Drain as after this signal, from any thread; asked a second time, end at once."""
        if self._loop is not None:
            with suppress(RuntimeError):  # a loop that is closed: it has ended since
                self._loop.call_soon_threadsafe(self._end, number)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        with self._signals():
            await self._http.serve([self._listening])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Take signals in this block, those excepted that are ignored: nohup wants that."""
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
        now = time.monotonic()
        if now - self._signalled_at >= self._together_seconds(number):
            self._signalled_at = now
            self.end(number)

    def _end(self, number: int) -> None:
        if self.number is not None:
            self._end_now()
            return
        self.number = number
        # First of all: a line for the operator may fail, and the end is not to hang on that.
        self._endpoints.draining = True
        self._http.should_exit = True
        limits = self._endpoints.limits
        limit = limits.seconds if limits.drain_seconds is None else limits.drain_seconds
        asyncio.get_running_loop().call_later(limit, self._end_now)
        count = len(self._http.server_state.tasks)
        open_ones = f"{plural(count, 'open request')} {'is' if count == 1 else 'are'} answered"
        self._told(f"{signal.Signals(number).name}: ending; {open_ones}, unless it comes again")

    def _end_now(self) -> None:
        """Answers end with an error, which goes out where it is read."""
        self._endpoints.end_all()
        asyncio.get_running_loop().call_later(LAST_SECONDS, self._force)

    def _force(self) -> None:
        # One whose client does not read would stay, and with it the server.
        for connection in tuple(self._http.server_state.connections):
            connection.transport.abort()
        self._http.force_exit = True


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level=logging.ERROR,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
