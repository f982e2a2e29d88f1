"""HTTP responses: an object of JSON, an error, and a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from partita.serve.answers import Answer, event, to_json
from partita.serve.api_errors import ApiError
from partita.serve.exchange import Exchange, GoneError, Said

ABORT = "partita.abort"
"""Key of the scope: a function that drops the connection, whatever is still to be sent."""
GONE_STATUS = 499
"""What proxies log for a client that closed the connection before its answer; nobody reads it."""
NO_STORE = {"Cache-Control": "no-store"}


def json_response(record: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An object as a response."""
    return Response(to_json(record), status, {**NO_STORE, **(headers or {})}, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """An error as a response."""
    return json_response(error.body(), error.status, dict(error.headers))


class EventStream(Response):
    """The answer piece by piece. What goes wrong after the first one is an event of its own, and there is no [DONE]."""

    def __init__(self, exchange: Exchange, answer: Answer, first: list[Said], ended: Callable[[], object]) -> None:
        """`first`: the pieces that have come; `ended` is called at the end, however it comes."""
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # nginx would hold events back
        self._exchange, self._answer, self._first, self._ended = exchange, answer, first, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A client that reads too slowly holds no row, and is dropped when the time of a request is up."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(loop.time() + max(0.0, self._exchange.deadline - time.monotonic()) + 1.0):
                await self._send_all(send)
        except GoneError:
            pass
        except TimeoutError:
            scope.get(ABORT, lambda: None)()
        finally:
            self._exchange.close()
            self._ended()

    async def _send_all(self, send: Send) -> None:
        exchange, answer = self._exchange, self._answer
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        data = b"".join([*answer.openings(), *self._events(self._first)])
        try:
            while not exchange.over:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = b"".join(self._events(await exchange.next()))
            data += answer.closing(exchange.choices)
        except ApiError as error:
            data = event(error.body())
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _events(self, said: list[Said]) -> list[bytes]:
        found = []
        for entry in said:
            choice = self._exchange.choices[entry.index]
            choice.take(entry.piece, keep=False)
            piece = self._answer.piece(entry.index, entry.piece)
            if piece is not None:
                found.append(piece)
        return found
