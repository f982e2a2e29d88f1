"""The application: checks of every request (API keys, origins, limits), then OpenAI's endpoints and the report."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import partita
from partita.errors import PartitaError, UsageError
from partita.observations.text_format import human_bytes
from partita.options.generation import ServerLimits
from partita.partition_reports.render.html import policy
from partita.partition_reports.render.show import load_view, view_names
from partita.serve.exchange import Exchange
from partita.serve.metrics import Metrics
from partita.serve.protocol import (
    CHAT,
    COMPLETION,
    ApiError,
    CompletionsBase,
    internal_error,
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
"""Paths without API key and `--max-requests` limit, for load balancers."""
UNCOUNTED = "/metrics"
"""Paths without `--max-requests` limit."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models", OPEN_TO_ALL, UNCOUNTED, "/report")
"""Path labels of the metrics; others are `other`, because clients may send any path."""
JSON_TYPE = "application/json"
READ_SECONDS = 30.0
"""Time limit for receiving a request body."""
AUTHORITY = re.compile(r"https?://[^/]*", re.IGNORECASE)
"""Start of a target in absolute form, which servers must accept (RFC 9112, section 3.2.2)."""
DISCARDED = 8
"""A request body above the limit is read up to this multiple of it: many clients read no response before they sent
all."""


class Endpoints:
    """The endpoints, all in one event loop."""

    def __init__(self, models: Mapping[str, ServedPackage], limits: ServerLimits, metrics: Metrics) -> None:
        """`models`: by name. Raises UsageError if two packages or adapters have the same name."""
        self.limits, self.metrics = limits, metrics
        self.models = dict(models)
        self.names = model_names({name: served.adapters for name, served in models.items()})
        self.draining = False
        """New requests are rejected; open requests are completed."""

    async def respond(self, request: Request, kind: type[CompletionsBase]) -> Exchange:
        """`POST /v1/chat/completions` and `/v1/completions`."""
        if self.draining:
            raise shutting_down()
        body = read_body(kind, await receive_body(request, self.limits))
        return Exchange(*self._named(body.model), body, self.limits, self.metrics)

    def _named(self, name: str) -> tuple[ServedPackage, str | None]:
        """The package and adapter of a model name. Raises ApiError."""
        if name not in self.names:
            message = f"The model {value_text(name)} does not exist; this server has {', '.join(self.names)}."
            raise ApiError(404, message, param="model", code="model_not_found")
        package, adapter = self.names[name]
        return self.models[package], adapter

    async def list_models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_response({"object": "list", "data": [self._model_entry(name) for name in self.names]})

    async def one_model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
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

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 while requests are accepted, else 503."""
        down = [served.name for served in self.models.values() if not served.is_running]
        status = "draining" if self.draining else "down" if down else "ok"
        record = {"status": status, "version": partita.__version__, "models": list(self.models), "down": down}
        return json_response(record, 200 if status == "ok" else 503)

    async def show_metrics(self, request: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        text, content_type = self.metrics.encoded(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def report(self, request: Request) -> Response:
        """`GET /report`: the partition report of the running sessions; `?model=`, `?view=`."""
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
    for package, each in adapters.items():
        for adapter in each:
            if adapter in names:
                raise UsageError(
                    f"two models are named {adapter}: the adapter of {package}, and another model; give "
                    "the packages other names with `name`, or use separate servers"
                )
            names[adapter] = package, adapter
    return names


def make_app(endpoints: Endpoints) -> Starlette:
    """The application: routes and error responses."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", partial(endpoints.respond, kind=CHAT), methods=["POST"]),
            Route("/v1/completions", partial(endpoints.respond, kind=COMPLETION), methods=["POST"]),
            Route("/v1/models", endpoints.list_models),
            Route("/v1/models/{name:path}", endpoints.one_model),
            Route("/health", endpoints.health),
            Route("/metrics", endpoints.show_metrics),
            Route("/report", endpoints.report),
        ],
        exception_handlers=dict.fromkeys(
            (ApiError, PartitaError, HTTPException, ClientDisconnect, Exception), _on_error
        ),
    )
    app.router.redirect_slashes = False
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    """The response to an error of a request."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, PartitaError):
        return of_error(error).response()
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE_STATUS)
    if isinstance(error, HTTPException):
        url = f"{request.method} {request.url.path[:200]}"
        known = {
            404: ("unknown_url", f"Unknown request URL: {url}; see /v1/models, /v1/chat/completions, /v1/completions."),
            405: ("method_not_allowed", f"Method not allowed: {url}."),
        }
        code, message = known.get(error.status_code, (None, sentence(str(error.detail))))
        return ApiError(error.status_code, message, code=code, headers=error.headers or {}).response()
    return internal_error().response()  # Starlette raises it again, and the gate logs it


class Gate:
    """An ASGI application that wraps the endpoints."""

    def __init__(
        self,
        app: ASGIApp,
        most: int,
        metrics: Metrics,
        keys: Sequence[str] = (),
        origins: Sequence[str] = (),
        log: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`most`: open requests. `keys`: accepted API keys; empty: none needed. `origins`: allowed origins of web pages
        besides the server's own; `*`: any. `log` is called with a line for the operator."""
        self._app, self._metrics, self._log = app, metrics, log
        self._keys, self._origins = [key.encode("utf-8") for key in keys], frozenset(origins)
        self.open_requests, self._most = 0, most
        metrics.open.set_function(lambda: self.open_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        if not scope["path"].startswith("/"):
            scope["path"] = AUTHORITY.sub("", scope["path"], count=1) or "/"
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
            refusal = self._refusal(path, Headers(scope=scope))
            await (self._app if refusal is None else refusal.response())(scope, receive, noted)
        except asyncio.CancelledError:  # the server ends while the body arrives
            if status:
                raise
            await shutting_down().response()(scope, receive, noted)
        except Exception as error:
            self._log(f"internal error: {type(error).__name__}: {error}; this is a bug in Partita")
            if status:
                raise  # uvicorn closes the connection
            await internal_error().response()(scope, receive, noted)
        finally:
            self.open_requests -= 1
            endpoint = next((each for each in ENDPOINTS if path == each or path.startswith(f"{each}/")), "other")
            self._metrics.responses.labels(endpoint, str(status or "none")).inc()

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
        if self.open_requests > self._most and path != UNCOUNTED:
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


def guard_app(gate: ASGIApp, origins: Sequence[str], host: str | None) -> ASGIApp:
    """The gate with browser checks: CORS for `origins` and, on a loopback address, the Host header.

    `host`: the loopback host that the server listens on; None: another address, which may have any host name.
    """
    app = gate
    if origins:
        app = CORSMiddleware(
            app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["*"]
        )
    if (
        host is not None and "*" not in origins
    ):  # otherwise a page whose host name resolves to this machine is same-origin
        hosts = {*OWN_HOSTS, host, *(urlsplit(origin).hostname or "" for origin in origins)}
        app = TrustedHostMiddleware(app, allowed_hosts=sorted(hosts), www_redirect=False)
    return app
