"""The ASGI application: checks of every request (API keys, origins, limits), OpenAI's endpoints, report and metrics."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import partita
from partita.errors import PartitaError, UsageError
from partita.observations.text_format import human_bytes
from partita.options.generation import ServeCommand
from partita.partition_reports.render.html import policy
from partita.partition_reports.render.show import load_view, view_names
from partita.serve.exchange import Exchange
from partita.serve.metrics import Metrics
from partita.serve.protocol import (
    SERVER,
    ApiError,
    ChatRequest,
    CompletionRequest,
    CompletionsBase,
    json_response,
    of_error,
    overloaded_error,
    read_body,
    sentence,
    shutting_down,
    value_text,
)
from partita.serve.served_package import ServedPackage

REPORT_TYPES = {".html": "text/html", ".json": "application/json", ".md": "text/markdown"}
"""Content type of a report view, by file suffix; text otherwise."""
GONE_STATUS = 499
"""Status that proxies log if a client closed the connection before its response."""
OWN_HOSTS = ("localhost", "127.0.0.1", "[::1]")
OPEN_TO_ALL = "/health"
"""Path without API key and `--max-requests` limit, for load balancers."""
UNCOUNTED = "/metrics"
"""Path without `--max-requests` limit."""
JSON_TYPE = "application/json"
READ_SECONDS = 30.0
"""Time limit for receiving a request body."""
AUTHORITY = re.compile(r"https?://[^/]*", re.IGNORECASE)
"""Start of a target in absolute form, which servers must accept (RFC 9112, section 3.2.2)."""
DISCARDED = 8
"""A request body above the limit is read up to this multiple of it: many clients read no response before they sent
all."""


class App:
    """The application, in one event loop."""

    def __init__(
        self,
        models: Mapping[str, ServedPackage],
        options: ServeCommand,
        metrics: Metrics,
        *,
        most: int,
        log: Callable[[str], object],
    ) -> None:
        """`models`: by name. `most`: open requests. `log` is called with a line for the operator.

        Raises UsageError if two packages or adapters have the same name.
        """
        self.limits, self.metrics, self.models, self._log = options, metrics, dict(models), log
        self.names = model_names({name: served.adapters for name, served in models.items()})
        self.draining = False
        """New requests are rejected; open requests are completed."""
        self.open_requests, self._most = 0, most
        metrics.open.set_function(lambda: self.open_requests)
        self._keys, self._origins = [key.encode() for key in options.api_key], frozenset(options.allowed_origin)
        routes = [
            Route("/v1/chat/completions", partial(self._complete, ChatRequest), methods=["POST"]),
            Route("/v1/completions", partial(self._complete, CompletionRequest), methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._one_model),
            Route(OPEN_TO_ALL, self._health),
            Route(UNCOUNTED, self._show_metrics),
            Route("/report", self._report),
        ]
        self._router = Router(routes, redirect_slashes=False)
        self._endpoints = [route.path for route in routes if "{" not in route.path]
        """Path labels of the metrics; others are `other`, because clients may send any path."""

    def guarded(self, host: str | None) -> ASGIApp:
        """The application behind browser checks: CORS and, on a loopback address, the Host header.

        `host`: the loopback host that the server listens on; None: another address, which may have any host name.
        """
        app: ASGIApp = self
        if self._origins:
            every: dict[str, Any] = dict.fromkeys(("allow_headers", "expose_headers"), ["*"])
            app = CORSMiddleware(app, allow_origins=[*self._origins], allow_methods=["GET", "POST"], **every)
        if host is not None and "*" not in self._origins:  # else a page whose name resolves to this machine is its own
            hosts = {*OWN_HOSTS, host, *(urlsplit(origin).hostname or "" for origin in self._origins)}
            app = TrustedHostMiddleware(app, allowed_hosts=sorted(hosts), www_redirect=False)
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; an error before the response is one."""
        if scope["type"] != "http":
            return
        if not scope["path"].startswith("/"):
            scope["path"] = AUTHORITY.sub("", scope["path"], count=1) or "/"
        scope["app"] = self  # so that the router raises HTTPException
        path, status = scope["path"], 0
        added = [(b"x-request-id", f"req_{secrets.token_hex(12)}".encode()), (b"x-content-type-options", b"nosniff")]

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        self.open_requests += 1
        try:
            self._check(path, Headers(scope=scope))
            await self._router(scope, receive, noted)
        except (Exception, asyncio.CancelledError) as error:
            response = self._response(error, f"{scope['method']} {path[:200]}")
            if status:
                raise  # uvicorn closes the connection
            await response(scope, receive, noted)
        finally:
            self.open_requests -= 1
            endpoint = next((each for each in self._endpoints if f"{path}/".startswith(f"{each}/")), "other")
            self.metrics.responses.labels(endpoint, str(status or "none")).inc()

    def _response(self, error: BaseException, request: str) -> Response:
        """The response to an error of a request."""
        if isinstance(error, ApiError):
            return error.response()
        if isinstance(error, PartitaError):
            return of_error(error).response()
        if isinstance(error, asyncio.CancelledError):  # the server ends while the body arrives
            return shutting_down().response()
        if isinstance(error, ClientDisconnect):
            return Response(status_code=GONE_STATUS)
        if isinstance(error, HTTPException):
            pages = "see /v1/models, /v1/chat/completions, /v1/completions"
            known = {
                404: ("unknown_url", f"Unknown request URL: {request}; {pages}."),
                405: ("method_not_allowed", f"Method not allowed: {request}."),
            }
            code, message = known.get(error.status_code, (None, sentence(str(error.detail))))
            return ApiError(error.status_code, message, code=code, headers=error.headers or {}).response()
        self._log(f"internal error: {type(error).__name__}: {error}; this is a bug in Partita")
        return ApiError(500, "The server had an internal error while processing the request.", SERVER).response()

    def _check(self, path: str, headers: Headers) -> None:
        """Raise ApiError for a request that must not reach an endpoint."""
        if "transfer-encoding" in headers and "content-length" in headers:  # RFC 9112, section 6.1
            close = {"Connection": "close"}
            raise ApiError(400, "Transfer-Encoding and Content-Length cannot be sent together.", headers=close)
        origin, host = headers.get("origin"), headers.get("host", "")
        own = (None, f"http://{host}", f"https://{host}")  # https behind a proxy
        if origin not in own and not {"*", origin} & self._origins:
            message = f"The origin {str(origin)[:100]} is not allowed; add it to `allowed_origin` of the server."
            raise ApiError(403, message, code="origin_not_allowed")
        if path == OPEN_TO_ALL:
            return
        if self._keys and not self._has_key(headers.get("authorization", "")):
            message = "Incorrect or missing API key; send it as Authorization: Bearer KEY."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self.open_requests > self._most and path != UNCOUNTED:
            self.metrics.refused.labels("").inc()  # the model is not known yet
            raise overloaded_error("The server has too many open requests; try again later.", "too_many_requests")

    def _has_key(self, authorization: str) -> bool:
        """Whether the key is valid. All keys are compared, each in constant time."""
        kind, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1")
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return kind.lower() == "bearer" and any(matches)

    # --- endpoints ----------------------------------------------------------------------------------------------------

    async def _complete(self, kind: type[CompletionsBase], request: Request) -> Exchange:
        """`POST /v1/chat/completions` and `/v1/completions`."""
        if self.draining:
            raise shutting_down()
        body = read_body(kind, await receive_body(request, self.limits.max_body))
        return Exchange(*self._named(body.model), body, self.limits, self.metrics)

    def _named(self, name: str) -> tuple[ServedPackage, str | None]:
        """The package and adapter of a model name. Raises ApiError."""
        if name not in self.names:
            message = f"The model {value_text(name)} does not exist; this server has {', '.join(self.names)}."
            raise ApiError(404, message, param="model", code="model_not_found")
        package, adapter = self.names[name]
        return self.models[package], adapter

    async def _list_models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_entry(name) for name in self.names]})

    async def _one_model(self, request: Request) -> Response:
        return json_response(self._model_entry(request.path_params["name"]))

    def _model_entry(self, name: str) -> dict[str, Any]:
        served, adapter = self._named(name)
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "partita",
            "parent": None if adapter is None else served.name,
            "max_model_len": served.max_length,
        }

    async def _health(self, request: Request) -> Response:
        """200 while requests are accepted, else 503."""
        down = [served.name for served in self.models.values() if not served.is_running]
        status = "draining" if self.draining else "down" if down else "ok"
        record = {"status": status, "version": partita.__version__, "models": list(self.models), "down": down}
        return json_response(record, 200 if status == "ok" else 503)

    async def _show_metrics(self, request: Request) -> Response:
        text, content_type = self.metrics.encoded(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def _report(self, request: Request) -> Response:
        """The partition report of the running sessions; `?model=`, `?view=`."""
        served, _ = self._named(request.query_params.get("model") or next(iter(self.models)))
        default = "html" if "text/html" in request.headers.get("accept", "") else "json"
        name = request.query_params.get("view") or default
        if name not in view_names():
            message = f"There is no view {value_text(name)}; choose one of {', '.join(view_names())}."
            raise ApiError(400, message, param="view")
        view = load_view(name)
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(served.reporter, lambda: view.to_text(served.report()))
        allowed = policy() if view.suffix == ".html" else "default-src 'none'"
        headers = {"Content-Security-Policy": f"{allowed}; frame-ancestors 'none'"}
        return Response(text, media_type=REPORT_TYPES.get(view.suffix, "text/plain"), headers=headers)


def model_names(adapters: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, str | None]]:
    """Every model name with its package and adapter: packages, then their adapters.

    `adapters`: of each package. Raises UsageError for duplicate names.
    """
    names: dict[str, tuple[str, str | None]] = {package: (package, None) for package in adapters}
    for package, adapter in ((package, adapter) for package, each in adapters.items() for adapter in each):
        if adapter in names:
            raise UsageError(
                f"two models are named {adapter}: the adapter of {package}, and another model; give the packages "
                "other names with `name`, or use separate servers"
            )
        names[adapter] = package, adapter
    return names


async def receive_body(request: Request, most: int) -> bytes:
    """The request body, of at most `most` bytes.

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
                if received <= most:
                    body += chunk
                elif received > DISCARDED * most:
                    break
    except TimeoutError as error:
        message = f"The request did not arrive within {READ_SECONDS:g} s."
        raise ApiError(408, message, "timeout_error", code="slow_request") from error
    if received > most:
        message = f"The request is larger than {human_bytes(most)}, the limit of this server."
        raise ApiError(413, message, code="request_too_large")
    return bytes(body)
