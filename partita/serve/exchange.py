"""One HTTP request: its prompts as token ids in the scheduler, and its streamed response.

Pieces come from the scheduler; disconnects, the time limit and shutdown come from the event loop. All go through one
queue, in order of occurrence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from partita.errors import GenerationError, PartitaError, UsageError
from partita.library.engine.requests import Work
from partita.library.sampling import complete_sampling
from partita.options.generation import Sampling, ServerLimits
from partita.runtime.generate.text.tokens import TooLongError
from partita.serve.api_errors import ApiError, invalid, of_error, overloaded_error, run_error, shutting_down, timed_out
from partita.serve.metrics import Metrics
from partita.serve.protocol import ChatRequest, CompletionsBase, Prompt
from partita.serve.responses import CompletionsResponse, Delivery, ResponseChoice, event
from partita.serve.served_package import ServedPackage

LAST_SECONDS = 1.0
"""Seconds after the time limit for sending the error."""


class Exchange:
    """The prompts of one request. `close` frees their rows."""

    def __init__(
        self,
        served: ServedPackage,
        adapter: str | None,
        body: CompletionsBase,
        limits: ServerLimits,
        metrics: Metrics,
        opened: set[Exchange],
    ) -> None:
        """`opened`: the set of open exchanges, which contains it until it is closed.

        Raises ApiError for more choices than rows and queue can hold.
        """
        self.served, self._adapter, self._body, self._limits, self._metrics = served, adapter, body, limits, metrics
        self._count = max(1, len(body.prompts)) * body.n
        self._room = served.slots + limits.max_queue
        if self._count > self._room:
            message = f"The request has {self._count:,} choices, but this server supports {self._room:,} at once."
            raise invalid(message, "prompt" if body.n == 1 else "n")
        self._began = time.monotonic()
        self.deadline = self._began + limits.timeout
        self.choices: list[ResponseChoice] = []
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Delivery | Exception | None] = asyncio.Queue()
        """None when the prompts are tokenized."""
        self._unfinished = self._count
        self._accepted = False
        self._error: Exception | None = None
        """Ends the request after the earlier pieces were sent."""
        self._tasks: list[asyncio.TimerHandle | asyncio.Task[None]] = []
        """Tasks of the time limit and of the wait for a disconnect."""
        self._opened = opened
        opened.add(self)

    async def begin(self, receive: Receive) -> CompletionsResponse:
        """Tokenize the prompts in the tokenizer's thread and submit them; return the response to send.

        Raises ApiError for a rejected prompt, a full queue and the time limit; ClientDisconnect.
        """
        served = self.served
        if served.open_prompts + served.unread + self._count > self._room:
            self._metrics.refused.labels(served.name).inc()
            message = f"The queue of {served.name} is full ({self._limits.max_queue:,} waiting); try again later."
            raise overloaded_error(message, "queue_full")
        timer = self._loop.call_later(self._limits.timeout, self.end, timed_out(self._limits.timeout))
        self._tasks = [timer, self._loop.create_task(self._until_gone(receive))]
        served.unread += self._count
        try:
            requests, answer = await self._read()
        finally:
            served.unread -= self._count
        for index, work in enumerate(requests):
            choice = ResponseChoice(index, self._events.put_nowait)
            try:
                choice.ticket = served.submit(work, choice)
            except PartitaError as error:
                raise of_error(error) from error
            self.choices.append(choice)
        self._accepted = True
        return answer

    async def _read(self) -> tuple[list[Work], CompletionsResponse]:
        """Do everything that needs the tokenizer; prompts of an ended request are not tokenized."""
        served, body = self.served, self._body

        def read() -> tuple[list[Work], CompletionsResponse]:
            answer = CompletionsResponse(body, served.text, served.stop_ids, served.fingerprint)
            return works(body, served, self._adapter), answer

        reading = self._loop.run_in_executor(served.encoder, read)
        reading.add_done_callback(lambda _: self._events.put_nowait(None))
        ended = await self._events.get()
        if isinstance(ended, Exception):
            reading.cancel()
            raise ended
        found: tuple[list[Work], CompletionsResponse] = await reading
        return found

    def end(self, error: Exception | None = None) -> None:
        """End the request with an error; None: the server is shutting down."""
        self._events.put_nowait(error or shutting_down())

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientDisconnect())

    @property
    def is_finished(self) -> bool:
        """Whether all choices are finished."""
        return self._unfinished == 0

    async def next(self) -> list[Delivery]:
        """The next pieces, at least one. Raises ApiError if the request ends without a response; ClientDisconnect."""
        found = [self._checked(self._error or await self._events.get())]
        while not self.is_finished and not self._events.empty():
            entry = self._events.get_nowait()
            try:
                found.append(self._checked(entry))
            except Exception as error:  # noqa: BLE001 - raised after the earlier pieces were sent
                self._error = error
                break
        return found

    def _checked(self, entry: Delivery | Exception | None) -> Delivery:
        if isinstance(entry, Exception):
            raise entry
        assert entry is not None
        finish = entry.piece.finish_reason
        if finish in ("error", "interrupted"):
            raise run_error(entry.choice.ticket.error)
        self._unfinished -= finish is not None
        return entry

    def close(self) -> None:
        """Cancel unfinished choices."""
        self._opened.discard(self)
        for task in self._tasks:
            task.cancel()
        for choice in self.choices:
            if choice.ticket.state != "finished":
                choice.ticket.cancel()
        if self._accepted:  # rejected requests take no time, and would distort the metric
            self._metrics.request_seconds.labels(self.served.name).observe(time.monotonic() - self._began)


class EventStream(Response):
    """The response as server-sent events. An error after the first piece is an event, without [DONE] after it."""

    def __init__(self, exchange: Exchange, answer: CompletionsResponse, first: list[Delivery]) -> None:
        """`first`: the first pieces."""
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # nginx would buffer events
        self._exchange, self._answer, self._first = exchange, answer, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. A slow client occupies no row, and its stream ends at the time limit."""
        left = self._exchange.deadline - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left) + LAST_SECONDS):
                await self._send_all(send)
        except (ClientDisconnect, TimeoutError):
            pass  # the response is incomplete, so uvicorn closes the connection
        finally:
            self._exchange.close()

    async def _send_all(self, send: Send) -> None:
        exchange, answer = self._exchange, self._answer
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        data = b"".join(answer.openings()) + self._events(self._first)
        try:
            while not exchange.is_finished:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = self._events(await exchange.next())
            data += answer.closing(exchange.choices)
        except ApiError as error:
            data = event(error.body())
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _events(self, pieces: list[Delivery]) -> bytes:
        return b"".join(self._answer.piece(entry.choice.number, entry.piece) for entry in pieces)


# --- prompts, in the tokenizer's thread ------------------------------------------------------------------------------


def works(body: CompletionsBase, served: ServedPackage, adapter: str | None = None) -> list[Work]:
    """One request for each choice of the response; choices of a prompt are consecutive.

    `adapter`: one of the package's; None: the server's. Raises ApiError for a prompt that is empty, too long for the
    cache, or rejected by chat template or tokenizer, and for token ids outside the vocabulary.
    """
    limit, most_tokens = served.max_length, body.max_tokens
    if most_tokens is not None and most_tokens > limit:
        raise invalid(
            f"max_tokens is too large: {most_tokens:,}. This model supports at most {limit:,} tokens for "
            "prompt and completion together.",
            "max_tokens",
        )
    _check_ids(body.stop_token_ids, served, "stop_token_ids")
    stop_ids = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else served.stop_ids)
    found: list[Work] = []
    for prompt in _prompts(body, served):
        room = limit - len(prompt)
        sampling = complete_sampling(
            Sampling(**body.sampling(), max_new_tokens=min(most_tokens or room, room)), served.suggests
        )
        work = Work(
            prompt=prompt,
            sampling=sampling,
            stop=tuple(body.stop),
            stop_ids=tuple(sorted(stop_ids)),
            logprobs=body.alternatives,
            adapter=adapter,
        )
        for number in range(len(found), len(found) + body.n):  # choices with the same seed would be equal
            seed = None if sampling.seed is None else sampling.seed + number
            found.append(replace(work, sampling=replace(sampling, seed=seed)))
    return found


def _prompts(body: CompletionsBase, served: ServedPackage) -> list[tuple[int, ...]]:
    """Token ids of each prompt; each leaves room for at least one new token. Raises ApiError."""
    if isinstance(body, ChatRequest):
        if not served.has_template:
            message = "This model has no chat template, so it does not support messages; use /v1/completions."
            raise invalid(message, "messages", "no_template")
        return [_encoded(body, served, "messages")]
    names = [f"prompt[{index}]" for index in range(len(body.prompts))] if len(body.prompts) > 1 else ["prompt"]
    return [_encoded(prompt, served, name) for name, prompt in zip(names, body.prompts, strict=True)]


def _encoded(prompt: Prompt | ChatRequest, served: ServedPackage, name: str) -> tuple[int, ...]:
    """Token ids of one prompt, which the body has under `name`."""
    try:
        if isinstance(prompt, ChatRequest):
            found = tuple(served.text.encode_messages([message.for_template() for message in prompt.messages]))
        elif isinstance(prompt, str):
            found = tuple(served.text.encode(prompt)) if prompt else ()
        else:
            _check_ids(prompt, served, name)
            found = tuple(prompt)
    except (UsageError, GenerationError) as error:
        refused = of_error(error, name)
        refused.code = "context_length_exceeded" if isinstance(error, TooLongError) else refused.code
        raise refused from error
    if not found:
        raise invalid(f"Invalid '{name}': it is empty; pass text to continue.", name, "empty_string")
    if len(found) >= served.max_length:
        raise invalid(
            f"This model's maximum context length is {served.max_length:,} tokens of prompt and completion. "
            f"However, '{name}' has {len(found):,} tokens. Please reduce its length.",
            name,
            "context_length_exceeded",
        )
    return found


def _check_ids(ids: Sequence[int], served: ServedPackage, name: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < served.vocab_size), None)
    if wrong is not None:
        valid = f"valid ids are 0 to {served.vocab_size - 1:,}"
        raise invalid(f"Invalid '{name}': {str(wrong)[:30]} is not a token id; {valid}.", name)
