"""Checks of every request (API keys, origins, limits), and receiving of request bodies."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from partita.observations.text_format import human_bytes
from partita.options.generation import ServerLimits
from partita.serve.api_errors import ApiError, internal_error, overloaded_error
from partita.serve.metrics import Metrics

OPEN_TO_ALL = "/health"
"""Paths without API key and `--max-requests` limit, for load balancers."""
UNCOUNTED = "/metrics"
"""Paths without `--max-requests` limit."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models", OPEN_TO_ALL, UNCOUNTED, "/report")
"""Path labels of the metrics; others are `other`, because clients may send any path."""
JSON_TYPE = "application/json"
READ_SECONDS = 30.0
"""Time limit for receiving a request body."""
DISCARDED = 8
"""A request body above the limit is read up to this multiple of it: many clients read no response before they sent
all."""
AUTHORITY = re.compile(r"https?://[^/]*", re.IGNORECASE)
"""Start of a target in absolute form, which servers must accept (RFC 9112, section 3.2.2)."""


class Gate:
    """An ASGI application that wraps the endpoints."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ServerLimits,
        metrics: Metrics,
        keys: Sequence[str] = (),
        origins: Sequence[str] = (),
        log: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`keys`: accepted API keys; empty: none needed. `origins`: allowed origins of web pages besides the server's
        own; `*`: any. `log` is called with a line for the operator."""
        self._app, self._metrics, self._log = app, metrics, log
        self._keys, self._origins = [key.encode("utf-8") for key in keys], frozenset(origins)
        self.clients: Counter[object] = Counter()
        """Open requests by client address."""
        self.most = limits.max_requests
        metrics.open.set_function(self.clients.total)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        if not scope["path"].startswith("/"):
            scope["path"] = AUTHORITY.sub("", scope["path"], count=1) or "/"
        path, client, status = scope["path"], scope.get("client"), 0
        added = [(b"x-request-id", f"req_{secrets.token_hex(12)}".encode()), (b"x-content-type-options", b"nosniff")]

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        self.clients[client] += 1
        try:
            refusal = self._refusal(path, Headers(scope=scope))
            await (self._app if refusal is None else refusal.response())(scope, receive, noted)
        except Exception as error:
            self._log(f"internal error: {type(error).__name__}: {error}; this is a bug in Partita")
            if status:
                raise  # uvicorn closes the connection
            await internal_error().response()(scope, receive, noted)
        finally:
            self.clients[client] -= 1
            if not self.clients[client]:
                del self.clients[client]
            endpoint = next((each for each in ENDPOINTS if path == each or path.startswith(f"{each}/")), "other")
            self._metrics.responses.labels(endpoint, str(status or "none")).inc()

    @property
    def open_requests(self) -> int:
        """Number of open requests."""
        return self.clients.total()

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        """The error for a request that must not reach the application; None if it may."""
        if "transfer-encoding" in headers and "content-length" in headers:  # RFC 9112, section 6.1
            close = {"Connection": "close"}
            return ApiError(400, "Transfer-Encoding and Content-Length cannot be sent together.", headers=close)
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin, headers.get("host", "")):
            message = f"The origin {origin[:100]} is not allowed; add it to `allowed_origin` of the server."
            return ApiError(403, message, code="origin_not_allowed")
        if path == OPEN_TO_ALL:
            return None
        if self._keys and not self._has_key(headers.get("authorization", "")):
            message = "Incorrect or missing API key; send it as Authorization: Bearer KEY."
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self.open_requests > self.most and path != UNCOUNTED:
            self._metrics.refused.labels("").inc()  # the model is not known yet
            return overloaded_error("The server has too many open requests; try again later.", "too_many_requests")
        return None

    def _allows(self, origin: str, host: str) -> bool:
        own = f"http://{host}", f"https://{host}"  # https behind a proxy
        return "*" in self._origins or origin in self._origins or origin in own

    def _has_key(self, authorization: str) -> bool:
        """Whether the key is valid. All keys are compared, each in constant time."""
        kind, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1")
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return kind.lower() == "bearer" and any(matches)


async def receive_body(request: Request, limits: ServerLimits) -> bytes:
    """The request body.

    Raises ApiError for a type other than JSON, and if it is too large or too slow; ClientDisconnect.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != JSON_TYPE:
        message = f"Unsupported content type '{media[:60]}'; send JSON, with the header Content-Type: {JSON_TYPE}."
        raise ApiError(415, message, code="unsupported_content_type")
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise ApiError(415, f"Unsupported content encoding '{coding[:60]}'; send the body unencoded.", code="encoding")
    body, received = bytearray(), 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for chunk in request.stream():
                received += len(chunk)
                if received <= limits.max_body:
                    body += chunk
                elif received > DISCARDED * limits.max_body:
                    break
    except TimeoutError as error:
        message = f"The request did not arrive within {READ_SECONDS:g} s."
        raise ApiError(408, message, "timeout_error", code="slow_request") from error
    if received > limits.max_body:
        message = f"The request is larger than {human_bytes(limits.max_body)}, the limit of this server."
        raise ApiError(413, message, code="request_too_large")
    return bytes(body)
