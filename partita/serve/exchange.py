"""One generation request: its prompts as token ids in the scheduler, and its response.

A response is one object or a stream of events: `chat.completion`, `chat.completion.chunk` and `text_completion` (OpenAI
API reference; openai-python, `types/chat` and `types/completion*.py`).

The time limit, a client that disconnects, and the end of the server all cancel the task of the request.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from partita.errors import GenerationError, UsageError
from partita.library.engine.requests import RequestOutput, Work
from partita.library.sampling import complete_sampling
from partita.options.generation import Sampling, ServerLimits
from partita.runtime.generate.choice.sampling import TokenLogprobs
from partita.runtime.generate.text.tokens import INCOMPLETE, Text, TooLongError
from partita.serve.metrics import Metrics
from partita.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionsBase,
    Prompt,
    invalid,
    json_response,
    of_error,
    overloaded_error,
    run_error,
    shutting_down,
    timed_out,
)
from partita.serve.served_package import Delivery, ResponseChoice, ServedPackage

LAST_SECONDS = 1.0
"""Seconds for sending an error in a stream after the time limit."""
FAILED = ("error", "interrupted")
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events
]


FINISH_REASONS = {"cache_full": "length"}
"""OpenAI's names of finish reasons, where they differ."""
DONE = b"data: [DONE]\n\n"


class Exchange:
    """The response to one request, as an ASGI application.

    An error before the first event is an HTTP error. Later it is an event, without [DONE] after it.
    """

    def __init__(
        self, served: ServedPackage, adapter: str | None, body: CompletionsBase, limits: ServerLimits, metrics: Metrics
    ) -> None:
        """Raises ApiError for more choices than rows and queue can hold."""
        self._served, self._adapter, self._body, self._limits, self._metrics = served, adapter, body, limits, metrics
        self._count = max(1, len(body.prompts)) * body.n
        self._room = served.slots + limits.max_queue
        if self._count > self._room:
            message = f"The request has {self._count:,} choices, but this server supports {self._room:,} at once."
            raise invalid(message, "prompt" if body.n == 1 else "n")
        self._choices: list[ResponseChoice] = []
        self._events: asyncio.Queue[Delivery] = asyncio.Queue()
        self._streams = self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError without a response; ClientDisconnect."""
        began, error = time.monotonic(), None
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self._watch(receive, task))
        try:
            # A slow client occupies no row: the scheduler does not wait for it.
            async with asyncio.timeout(self._limits.timeout):
                await self._answer(scope, receive, send)
        except TimeoutError:
            error = timed_out(self._limits.timeout)
        except asyncio.CancelledError:
            if self._gone and self._streams:  # it is the end of the response
                return
            if self._gone:
                raise ClientDisconnect from None
            error = shutting_down()
        except ApiError as found:
            error = found
        finally:
            watch.cancel()
            for choice in self._choices:
                if choice.ticket.state != "finished":
                    choice.ticket.cancel()
            if self._choices:  # rejected requests take no time, and would distort the metric
                self._metrics.request_seconds.labels(self._served.name).observe(time.monotonic() - began)
        if error is not None and not self._streams:
            raise error
        if error is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_SECONDS):
                    await self._send(send, event(error.body()), more=False)

    async def _watch(self, receive: Receive, task: asyncio.Task[object]) -> None:
        """Cancel the task of the request when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        task.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the prompts and send their pieces, or all at once. Raises ApiError."""
        works, answer = await self._read()
        for number, work in enumerate(works):
            choice = ResponseChoice(number, self._events.put_nowait)
            choice.ticket = self._served.submit(work, choice)
            self._choices.append(choice)
        unfinished = len(works)
        while unfinished:
            pieces, data, failed = [await self._events.get()], b"", None
            while not self._events.empty():
                pieces.append(self._events.get_nowait())
            for choice, piece in pieces:
                if piece.finish_reason in FAILED:
                    failed = run_error(choice.ticket.error)
                    break
                unfinished -= piece.finish_reason is not None
                if self._body.stream:
                    data += answer.piece(choice.number, piece)
                else:
                    choice.logprobs += piece.logprobs
            if self._body.stream and (data or failed is None):
                await self._send(send, data if self._streams else b"".join(answer.openings()) + data)
            if failed is not None:
                raise failed
        if self._body.stream:
            await self._send(send, answer.closing(self._choices), more=False)
        else:
            await json_response(answer.finished(self._choices))(scope, receive, send)

    async def _read(self) -> tuple[list[Work], CompletionsResponse]:
        """Do everything that needs the tokenizer in its thread; prompts of a cancelled request are not tokenized."""
        served, body = self._served, self._body
        if served.open_prompts + served.unread + self._count > self._room:
            self._metrics.refused.labels(served.name).inc()
            message = f"The queue of {served.name} is full ({self._limits.max_queue:,} waiting); try again later."
            raise overloaded_error(message, "queue_full")

        def read() -> tuple[list[Work], CompletionsResponse]:
            answer = CompletionsResponse(body, served.text, served.stop_ids, served.fingerprint)
            return works(body, served, self._adapter), answer

        served.unread += self._count
        try:
            return await asyncio.get_running_loop().run_in_executor(served.encoder, read)
        finally:
            served.unread -= self._count

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        """Send events."""
        if not self._streams:
            self._streams = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": data, "more_body": more})


# --- the response in OpenAI's format ----------------------------------------------------------------------------------


class CompletionsResponse:
    """The objects of one response."""

    def __init__(self, body: CompletionsBase, text: Text, stop_ids: frozenset[int], fingerprint: str) -> None:
        """`stop_ids`: stop tokens, which are not part of the text."""
        self._text, self._fingerprint = text, fingerprint
        self._chat, self._usage, self._each = isinstance(body, ChatRequest), body.include_usage, body.n
        self._wants_logprobs = body.alternatives is not None
        named = {token for stop in body.stop if (token := text.special(stop)) is not None}
        self._ends = named.union(body.stop_token_ids, () if body.ignore_eos else stop_ids)
        echoed = body.prompts if getattr(body, "echo", False) else [""] * max(1, len(body.prompts))
        texts = [prompt if isinstance(prompt, str) else text.decode_at_once(prompt) for prompt in echoed]
        self._echoes = [echo for echo in texts for _ in range(body.n)]
        prefix = "chatcmpl-" if self._chat else "cmpl-"
        self._head = {"id": prefix + secrets.token_hex(12), "created": int(time.time()), "model": body.model}
        self._offsets = [len(echo) for echo in self._echoes]
        """Characters of each choice's tokens so far, including text held back for a possible stop string."""

    def finished(self, choices: Sequence[ResponseChoice]) -> dict[str, Any]:
        """The response as one object."""
        listed = []
        for index, (choice, echo) in enumerate(zip(choices, self._echoes, strict=True)):
            found = choice.ticket.result
            text, logprobs = echo + found.text, self._logprobs(choice.logprobs, len(echo))
            message = {"role": "assistant", "content": text, "refusal": None}
            said: dict[str, Any] = {"message": message} if self._chat else {"text": text}
            listed.append(_choice(index, said, logprobs, found.finish_reason))
        name = "chat.completion" if self._chat else "text_completion"
        return {**self._object(name, listed), "usage": usage(choices, self._each)}

    def openings(self) -> list[bytes]:
        """The first events of a stream."""
        events = []
        for index, echo in enumerate(self._echoes):
            if self._chat:
                opening = {"delta": {"role": "assistant", "content": ""}}
                events.append(self._event([_choice(index, opening, None, None)]))
            elif echo:
                events.append(self._event([_choice(index, {"text": echo}, self._logprobs((), 0), None)]))
        return events

    def piece(self, index: int, piece: RequestOutput) -> bytes:
        """The event for a piece of a choice; empty if it has no content."""
        if not (piece.text or piece.finish_reason or (piece.logprobs and self._wants_logprobs)):
            return b""
        logprobs = self._logprobs(piece.logprobs, self._offsets[index])
        if logprobs is not None and not self._chat:
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        text = {"delta": delta} if self._chat else {"text": piece.text}
        return self._event([_choice(index, text, logprobs, piece.finish_reason)])

    def closing(self, choices: Sequence[ResponseChoice]) -> bytes:
        """The last events of a stream."""
        return (self._event([], usage(choices, self._each)) if self._usage else b"") + DONE

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": name, "system_fingerprint": self._fingerprint, "choices": choices}

    def _event(self, choices: list[dict[str, Any]], used: dict[str, int] | None = None) -> bytes:
        record = self._object("chat.completion.chunk" if self._chat else "text_completion", choices)
        return event({**record, "usage": used} if self._usage else record)

    def _logprobs(self, entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        kept = [entry for entry in entries if entry.token not in self._ends]
        if self._chat:
            content = [
                {
                    **self._token(entry.token, entry.logprob),
                    "top_logprobs": [self._token(token, value) for token, value in entry.top],
                }
                for entry in kept
            ]
            return {"content": content, "refusal": None}
        texts = [self._text.token_text(entry.token) for entry in kept]
        top = []
        for text, entry in zip(texts, kept, strict=True):
            likely: dict[str, float] = {}
            for token, value in entry.top:  # of tokens with the same text, the most likely comes first
                likely.setdefault(self._text.token_text(token), value)
            top.append(likely | {text: entry.logprob})
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in kept],
            "top_logprobs": top,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset))[: len(texts)],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text.token_text(token)
        # The bytes of part of a character are unknown.
        known = None if INCOMPLETE in text else list(text.encode("utf-8"))
        return {"token": text, "logprob": logprob, "bytes": known}


def _choice(index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": FINISH_REASONS.get(finish or "", finish)}


def usage(choices: Sequence[ResponseChoice], each: int) -> dict[str, int]:
    """Token counts; a prompt with several choices counts once, as in OpenAI's API. `each`: choices of each prompt."""
    found = [choice.ticket.result for choice in choices]
    prompt, new = sum(one.prompt_tokens for one in found[::each]), sum(len(one.tokens) for one in found)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def event(record: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(record) + b"\n\n"


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
