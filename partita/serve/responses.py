"""Responses in the format of OpenAI's API, as one object or as a stream of events.

Objects are `chat.completion`, `chat.completion.chunk` and `text_completion` (OpenAI API reference; openai-python,
`types/chat` and `types/completion*.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from pydantic_core import to_json

from partita.library.engine.requests import RequestOutput, Ticket
from partita.runtime.generate.choice.sampling import TokenLogprobs
from partita.runtime.generate.text.tokens import INCOMPLETE, Text
from partita.serve.protocol import ChatRequest, CompletionsBase

FINISH_REASONS = {"cache_full": "length"}
"""OpenAI's names of finish reasons, where they differ."""
DONE = b"data: [DONE]\n\n"


@dataclass(eq=False, slots=True)
class ResponseChoice:
    """One choice of a response: its request in the scheduler."""

    number: int
    """Index of the choice."""
    deliver: Callable[[Delivery], object]
    """Called in the event loop with each piece."""
    ticket: Ticket = field(init=False)
    """The submitted request."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of a response that is sent as one object."""
    has_begun: bool = False
    last_token: float | None = None
    """Time of the last token, by `time.perf_counter`."""


class Delivery(NamedTuple):
    """A piece on its way to the event loop."""

    choice: ResponseChoice
    piece: RequestOutput


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
