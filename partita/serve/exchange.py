"""One HTTP request with its prompts in the scheduler, and the response that streams its answer.

Pieces come from the scheduler; a client that disconnects, the time limit and the end of the server come from the event
loop. All of them arrive in one queue, in the order in which they happened.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from partita.errors import PartitaError
from partita.library.requests import Piece, Ticket, Work
from partita.serve.answers import Answer, Choice, event
from partita.serve.api_errors import ApiError, failed, invalid, of_error, overloaded, shutting_down, timed_out
from partita.serve.gate import ServerLimits
from partita.serve.protocol import Body
from partita.serve.served import Served

LAST_SECONDS = 1.0
"""After the time limit, for the error to be sent."""


class GoneError(Exception):
    """The client has disconnected."""


class ChoicePiece(NamedTuple):
    """A piece of one choice of the answer."""

    number: int
    """Index of the choice."""
    piece: Piece
    error: PartitaError | None
    """Why the choice ended, with finish reason `error`."""


class Exchange:
    """The prompts of one request. `close` frees their rows, however the request ends."""

    def __init__(self, served: Served, limits: ServerLimits, body: Body, began: float) -> None:
        """`began`: arrival of the request, by `time.monotonic`.

        Raises ApiError for more choices than rows and queue hold together.
        """
        self.served, self._limits = served, limits
        self._count = max(1, len(body.prompts)) * body.n
        self.deadline = began + limits.seconds
        self.choices: list[Choice] = []
        self._tickets: list[Ticket] = []
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[ChoicePiece | Exception] = asyncio.Queue()
        self._left = 0
        self._error: Exception | None = None
        """Ends the request once the pieces before it are sent."""
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._room = served.slots + limits.queue
        if self._count > self._room:
            said = f"The request asks for {self._count:,} choices, and this server takes {self._room:,} at once."
            raise invalid(said, "prompt" if body.n == 1 else "n")

    async def begin(
        self, read: Callable[[], list[Work]], receive: Callable[[], Awaitable[MutableMapping[str, Any]]]
    ) -> None:
        """Tokenize the prompts in the tokenizer's thread and submit them.

        Raises what `read` raises; ApiError when the queue is full and when the time is up; GoneError.
        """
        served = self.served
        if served.open + served.unread + self._count > self._room:
            said = f"The queue of {served.name} is full ({self._limits.queue:,} waiting); try again later."
            raise overloaded(said, "queue_full")
        self._timer = self._loop.call_later(
            max(0.0, self.deadline - time.monotonic()), self.end, timed_out(self._limits.seconds)
        )
        self._watch = self._loop.create_task(self._until_gone(receive))
        served.unread += self._count
        try:
            works = await self._read(read)
        finally:
            served.unread -= self._count
        self._left = len(works)
        for index, work in enumerate(works):
            try:
                self._tickets.append(served.submit(work, partial(self._put, index)))
            except PartitaError as error:
                raise of_error(error) from error
            self.choices.append(Choice(len(work.prompt)))

    async def _read(self, read: Callable[[], list[Work]]) -> list[Work]:
        """What `read` returns, unless the request ends before; a prompt of an ended request is not tokenized."""
        reading: asyncio.Future[list[Work]] = self._loop.run_in_executor(self.served.encoder, self.served.read, read)
        ending: asyncio.Future[Any] = self._loop.create_task(self._events.get())
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                self._checked(ending.result())
            return await reading
        finally:
            ending.cancel()
            reading.cancel()

    def _put(self, index: int, piece: Piece, error: PartitaError | None) -> None:
        self._events.put_nowait(ChoicePiece(index, piece, error))

    def end(self, error: Exception | None = None) -> None:
        """End the request with an error; None: the server ends."""
        self._events.put_nowait(error or shutting_down())

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(GoneError())

    @property
    def over(self) -> bool:
        """All choices are finished."""
        return self._left == 0

    async def next(self) -> list[ChoicePiece]:
        """The next pieces, at least one. Raises ApiError when the request ends without an answer; GoneError."""
        found = [self._checked(self._error or await self._events.get())]
        while not self.over and not self._events.empty():
            entry = self._events.get_nowait()
            try:
                found.append(self._checked(entry))
            except Exception as error:  # noqa: BLE001 - raised when the pieces before it are sent
                self._error = error
                break
        return found

    def _checked(self, entry: ChoicePiece | Exception) -> ChoicePiece:
        if isinstance(entry, Exception):
            raise entry
        finish = entry.piece.finish_reason
        if finish in ("error", "interrupted"):
            raise failed(entry.error)
        self._left -= finish is not None
        return entry

    def close(self) -> None:
        """Cancel what is not finished. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        for ticket in self._tickets:
            if ticket.state != "over":
                ticket.cancel()


class EventStream(Response):
    """The answer as server-sent events. An error after the first piece is an event, and no [DONE] follows it."""

    def __init__(
        self, exchange: Exchange, answer: Answer, first: list[ChoicePiece], ended: Callable[[], object]
    ) -> None:
        """`first`: the first pieces; `ended` is called at the end, however it comes."""
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # nginx would hold events back
        self._exchange, self._answer, self._first, self._ended = exchange, answer, first, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. A client that reads too slowly holds no row, and its stream is cut at the time limit."""
        left = self._exchange.deadline - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left) + LAST_SECONDS):
                await self._send_all(send)
        except (GoneError, TimeoutError):
            pass  # the response is incomplete, so uvicorn closes the connection
        finally:
            self._exchange.close()
            self._ended()

    async def _send_all(self, send: Send) -> None:
        exchange, answer = self._exchange, self._answer
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        data = b"".join(answer.openings()) + self._events(self._first)
        try:
            while not exchange.over:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = self._events(await exchange.next())
            data += answer.closing(exchange.choices)
        except ApiError as error:
            data = event(error.body())
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _events(self, pieces: list[ChoicePiece]) -> bytes:
        for entry in pieces:
            self._exchange.choices[entry.number].take(entry.piece, keep=False)
        return b"".join(self._answer.piece(entry.number, entry.piece) for entry in pieces)
