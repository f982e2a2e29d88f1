"""What stands around the application: keys, the number of open requests, and that every response is one of ours."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from partita.serve.api_errors import ApiError, bug, overloaded
from partita.serve.limits import ServerLimits
from partita.serve.metrics import Metrics
from partita.serve.responses import ABORT, error_response

OPEN_TO_ALL = ("/health",)
"""What a load balancer asks, without a key and however much is going on."""
UNCOUNTED = ("/metrics",)
"""What is wanted most when too much is going on; a key is asked for all the same."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/report")
"""What figures are told by; other paths are `other`: a stranger could think of any number."""

NO_SNIFF = (b"x-content-type-options", b"nosniff")
AUTHORITY = re.compile(r"https?://[^/]*", re.IGNORECASE)
"""What a target in absolute form has before its path: a client that takes this server for its proxy sends such."""


class Gate:
    """An ASGI application around another one."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ServerLimits,
        metrics: Metrics,
        keys: tuple[str, ...] = (),
        told: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`keys`: one of them has to come with every request; none: nobody is asked. `told` hears of bugs."""
        self._app, self._limits, self._metrics, self._told = app, limits, metrics, told
        self._keys = tuple(key.encode("utf-8") for key in keys)
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        scope["path"] = _own_path(scope["path"])
        status, whole = 0, False
        request_id = f"req_{secrets.token_hex(12)}".encode()

        async def counted(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id), NO_SNIFF]
            else:
                whole = not message.get("more_body", False)
            await send(message)

        scope[ABORT] = abort = _abort_of(send)
        self._open += 1
        self._metrics.open.set(self._open)
        try:
            refusal = self._refusal(scope)
            await (self._app if refusal is None else error_response(refusal))(scope, receive, counted)
        except Exception as error:  # noqa: BLE001 - the client gets an answer, the operator a line
            self._told(f"internal error: {type(error).__name__}: {error}; this is a bug in Partita")
            if status and not whole:
                abort()
            elif not status:
                await error_response(bug())(scope, receive, counted)
        finally:
            self._open -= 1
            self._metrics.open.set(self._open)
            self._metrics.responses.labels(_endpoint(scope["path"]), str(status or "none")).inc()

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is not looked at; None when it is."""
        if {b"transfer-encoding", b"content-length"} <= dict(scope["headers"]).keys():  # RFC 9112, section 6.1
            closing = {"Connection": "close"}
            return ApiError(400, "Transfer-Encoding and Content-Length cannot be sent together.", headers=closing)
        if scope["path"] in OPEN_TO_ALL:
            return None
        if self._keys and not self._is_known(scope):
            return ApiError(
                401,
                "Incorrect or missing API key; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._open > self._limits.requests and scope["path"] not in UNCOUNTED:
            self._metrics.refused.labels("").inc()  # whichever model it is for was not looked at
            return overloaded("The server has too many open requests; try again later.", "too_many_requests")
        return None

    def _is_known(self, scope: Scope) -> bool:
        """Whether the request has one of the keys. All of them are compared, each in the same time."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return kind.lower() == b"bearer" and any(matches)


def _own_path(path: str) -> str:
    """The path of a target in either form: HTTP has every server take both."""
    return path if path.startswith("/") else AUTHORITY.sub("", path, count=1) or "/"


def _endpoint(path: str) -> str:
    return next((known for known in ENDPOINTS if path == known or path.startswith(f"{known}/")), "other")


def _abort_of(send: Send) -> Callable[[], object]:
    """A function that drops the connection behind uvicorn's `send`; it does nothing behind another."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    return getattr(transport, "abort", lambda: None)
