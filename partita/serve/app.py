"""The routes of the server: OpenAI's endpoints, metrics, health and the partition report."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import partita
from partita.errors import PartitaError, UsageError
from partita.options.generation import ServerLimits
from partita.partition_reports.render.html import policy
from partita.partition_reports.render.show import load_view, view_names
from partita.serve.api_errors import ApiError, internal_error, json_response, of_error, sentence, shutting_down
from partita.serve.exchange import EventStream, Exchange
from partita.serve.gate import receive_body
from partita.serve.metrics import Metrics
from partita.serve.protocol import CHAT, COMPLETION, CompletionsBase, read_body, value_text
from partita.serve.served_package import ServedPackage

REPORT_TYPES = {".html": "text/html", ".json": "application/json", ".md": "text/markdown"}
"""Content type of a report view, by file suffix; text otherwise."""
LISTED = 30
"""Maximum number of model names in a message."""
GONE_STATUS = 499
"""Status that proxies log if a client closed the connection before its response."""
OWN_HOSTS = ("localhost", "127.0.0.1", "[::1]")


class Endpoints:
    """The endpoints, all in one event loop."""

    def __init__(self, models: Mapping[str, ServedPackage], limits: ServerLimits, metrics: Metrics) -> None:
        """`models`: by name. Raises UsageError if two packages or adapters have the same name."""
        self.limits, self.metrics = limits, metrics
        self.models = dict(models)
        self.names = model_names({name: served.adapters for name, served in models.items()})
        self.draining = False
        """New requests are rejected; open requests are completed."""
        self._exchanges: set[Exchange] = set()

    def end_all(self) -> None:
        """End every open response with an error."""
        for exchange in list(self._exchanges):
            exchange.end()

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._respond(request, CHAT)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._respond(request, COMPLETION)

    async def _respond(self, request: Request, kind: type[CompletionsBase]) -> Response:
        if self.draining:
            raise shutting_down()
        body = read_body(kind, await receive_body(request, self.limits))
        exchange = Exchange(*self._named(body.model), body, self.limits, self.metrics, self._exchanges)
        try:
            answer = await exchange.begin(request.receive)
            pieces = await exchange.next()
            if body.stream:
                return EventStream(exchange, answer, pieces)
            while True:
                for choice, piece in pieces:
                    choice.logprobs += piece.logprobs
                if exchange.is_finished:
                    response = json_response(answer.finished(exchange.choices))
                    exchange.close()
                    return response
                pieces = await exchange.next()
        except BaseException:
            exchange.close()
            raise

    def _named(self, name: str) -> tuple[ServedPackage, str | None]:
        """The package and adapter of a model name. Raises ApiError."""
        if name not in self.names:
            more = f" and {len(self.names) - LISTED:,} more" if len(self.names) > LISTED else ""
            listed = ", ".join([*self.names][:LISTED]) + more
            message = f"The model {value_text(name)} does not exist; this server has {listed}."
            raise ApiError(404, message, param="model", code="model_not_found")
        package, adapter = self.names[name]
        return self.models[package], adapter

    async def list_models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_response({"object": "list", "data": [self._model_entry(name) for name in self.names]})

    async def one_model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        name = request.path_params["name"]
        return json_response(self._model_entry(name)) if name else await self.list_models(request)

    def _model_entry(self, name: str) -> dict[str, Any]:
        served, adapter = self._named(name)
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "partita",
            "parent": None if adapter is None else served.name,
            "max_model_len": served.reading.max_length,
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
        text = await loop.run_in_executor(served.reporter, served.rendered_report, name, view.to_text)
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
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.complete, methods=["POST"]),
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
