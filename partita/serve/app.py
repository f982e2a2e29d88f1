"""The routes of the server: OpenAI's endpoints, the figures and the report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import partita
from partita.errors import PartitaError, UsageError
from partita.library.scheduler import Work
from partita.partition_reports.render.html import policy
from partita.partition_reports.render.view import load_view, view_names
from partita.serve.answers import Answer, ChatFormat, CompletionFormat, Tokens
from partita.serve.api_errors import ApiError, bug, of_error, sentence, shutting_down
from partita.serve.bodies import Asked, read_chat, read_completion, read_json
from partita.serve.exchange import Exchange, GoneError
from partita.serve.incoming import read_body
from partita.serve.limits import ServerLimits
from partita.serve.metrics import Metrics
from partita.serve.names import Named, Names
from partita.serve.prompts import works
from partita.serve.responses import GONE_STATUS, EventStream, error_response, json_response
from partita.serve.served import Served

REPORT_TYPES = {".html": "text/html", ".json": "application/json", ".md": "text/markdown"}
"""Content type of a view of the report, by the suffix of its files; text otherwise."""


class Endpoints:
    """What the routes do. Everything happens in one event loop."""

    def __init__(self, models: Mapping[str, Served], limits: ServerLimits, metrics: Metrics) -> None:
        """Raises UsageError where a package and an adapter would have one name."""
        self.models, self.limits, self.metrics = dict(models), limits, metrics
        self.names = Names({name: served.adapters for name, served in models.items()})
        self.draining = False
        """No request is taken any more; those that were are answered."""
        self._exchanges: set[Exchange] = set()

    def end_all(self) -> None:
        """End every open answer with an error: the time to drain is over."""
        for exchange in list(self._exchanges):
            exchange.end()

    # --- text ---------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, read_chat)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._answer(request, read_completion)

    async def _answer(self, request: Request, read: Callable[[Mapping[str, Any]], Asked]) -> Response:
        began = time.monotonic()
        if self.draining:
            raise shutting_down()
        asked = read(read_json(await read_body(request, self.limits)))
        named = self.names.named(asked.model)
        served = self.models[named.package]
        prepared = _Prepared(asked, served, named.adapter)
        exchange = Exchange(served, self.limits, began)
        exchange.check(max(1, len(asked.prompts)), asked.n)
        self._exchanges.add(exchange)
        ended = partial(self._ended, exchange, began)
        taken = streams = False
        try:
            try:
                await exchange.begin(prepared.read, request.receive)
            except ApiError as error:
                if error.code == "queue_full":
                    self.metrics.refused.labels(served.name).inc()
                raise
            taken = True
            answer = prepared.answer()
            first = await exchange.next()
            if asked.stream:
                streams = True
                return EventStream(exchange, answer, first, ended)
            while True:
                for said in first:
                    exchange.choices[said.index].take(said.piece, keep=True)
                if exchange.over:
                    return json_response(answer.finished(exchange.choices))
                first = await exchange.next()
        finally:
            if not streams:
                exchange.close()
                ended(taken=taken)

    def _ended(self, exchange: Exchange, began: float, *, taken: bool = True) -> None:
        """`taken`: it was not refused, which takes no time, and would make the server look fast."""
        self._exchanges.discard(exchange)
        if taken:
            self.metrics.request_seconds.labels(exchange.served.name).observe(time.monotonic() - began)

    # --- what there is ------------------------------------------------------------------------------------------------

    async def list_models(self) -> Response:
        """`GET /v1/models`."""
        listed = [self._listed(name, named) for name, named in self.names.listed.items()]
        return json_response({"object": "list", "data": listed})

    async def one_model(self, name: str) -> Response:
        """`GET /v1/models/NAME`; a path that ends with its slash is that of the list."""
        if not name:
            return await self.list_models()
        return json_response(self._listed(name, self.names.named(name)))

    def _listed(self, name: str, named: Named) -> dict[str, Any]:
        served = self.models[named.package]
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "partita",
            "parent": None if named.adapter is None else named.package,
            "max_model_len": served.reading.max_length,
        }

    async def health(self) -> Response:
        """`GET /health`: 200 while requests are taken, 503 otherwise."""
        down = [served.name for served in self.models.values() if not served.up]
        status = "draining" if self.draining else "down" if down else "ok"
        record = {"status": status, "version": partita.__version__, "models": list(self.models), "down": down}
        return json_response(record, 200 if status == "ok" else 503)

    async def show_metrics(self, request: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        text, content_type = self.metrics.written(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def report(self, request: Request) -> Response:
        """`GET /report`: the partition report of the running sessions; `?model=`, `?view=`."""
        name = request.query_params.get("model") or next(iter(self.models))
        served = self.models[self.names.named(name).package]
        wanted = request.query_params.get("view") or _view_for(request.headers.get("accept", ""))
        if wanted not in view_names():
            raise ApiError(
                400, f"No view is called '{wanted[:40]}'; there are {', '.join(view_names())}.", param="view"
            )
        view = load_view(wanted)
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(served.reporter, partial(served.shown, wanted, view.to_text))
        allowed = policy() if view.suffix == ".html" else "default-src 'none'"
        headers = {"Content-Security-Policy": f"{allowed}; frame-ancestors 'none'"}
        return Response(text, media_type=REPORT_TYPES.get(view.suffix, "text/plain"), headers=headers)


def make_app(endpoints: Endpoints) -> FastAPI:
    """The application, which knows nothing of keys and connections: `gate.Gate` goes around it."""
    app = FastAPI(title="partita", version=partita.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("POST", "/v1/chat/completions", endpoints.chat),
        ("POST", "/v1/completions", endpoints.complete),
        ("GET", "/v1/models", endpoints.list_models),
        ("GET", "/v1/models/{name:path}", endpoints.one_model),
        ("GET", "/health", endpoints.health),
        ("GET", "/metrics", endpoints.show_metrics),
        ("GET", "/report", endpoints.report),
    ]
    for method, path, function in routes:
        # Of an answer to HEAD the server sends the head alone.
        methods = [method, "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, function, methods=methods, response_model=None)
    app.router.redirect_slashes = False
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(PartitaError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)  # else it is a page of text; it goes on to the gate, which tells it
    app.add_exception_handler(GoneError, _on_gone)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PartitaError)
    return error_response(of_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    said = {
        404: f"Unknown request URL: {where}. This server has /v1/chat/completions, /v1/completions and /v1/models.",
        405: f"Not allowed to {where}.",
    }.get(error.status_code, sentence(str(error.detail)))
    code = "unknown_url" if error.status_code == 404 else "method_not_allowed" if error.status_code == 405 else None
    return error_response(ApiError(error.status_code, said, code=code, headers=dict(error.headers or {})))


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(bug())


async def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE_STATUS)


class _Prepared:
    """A request for text: what is read of it, and how its answer is written. `answer` comes after `read`."""

    def __init__(self, asked: Asked, served: Served, adapter: str | None) -> None:
        self._asked, self._served, self._adapter = asked, served, adapter
        self._form: ChatFormat | CompletionFormat | None = None
        self._echoes: list[str] = []

    def read(self) -> list[Work]:
        """Read the prompts, and all else that a tokenizer is asked for: not for an event loop. Raises ApiError."""
        try:
            found = works(self._asked, self._served.reading, self._adapter)
        except UsageError as error:
            raise of_error(error) from error
        self._form, self._echoes = _format(self._asked, self._served), _echoes(self._asked, self._served)
        return found

    def answer(self) -> Answer:
        """The answer to begin with."""
        assert self._form is not None
        asked, fingerprint = self._asked, self._served.fingerprint
        return Answer(self._form, asked.model, fingerprint, self._echoes, usage=asked.include_usage, each=asked.n)


def _format(asked: Asked, served: Served) -> ChatFormat | CompletionFormat:
    text, ends = served.reading.text, frozenset() if asked.ignore_eos else served.reading.stop_ids
    named = {token for stop in asked.stop if (token := text.special(stop)) is not None}
    tokens = Tokens(text, ends.union(asked.stop_token_ids, named))
    kind = ChatFormat if asked.messages else CompletionFormat
    return kind(tokens, asked.logprobs is not None)


def _echoes(asked: Asked, served: Served) -> list[str]:
    """What each choice begins with."""
    prompts = asked.prompts or ((),)
    if not asked.echo:
        return [""] * (len(prompts) * asked.n)
    text = served.reading.text
    said = [prompt if isinstance(prompt, str) else text.decode_at_once(prompt) for prompt in prompts]
    return [echo for echo in said for _ in range(asked.n)]


def _view_for(accept: str) -> str:
    """A browser gets the page, everyone else JSON."""
    return "html" if "text/html" in accept else "json"
