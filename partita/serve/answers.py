"""Answers in the format of OpenAI's API: what each choice said, whole or piece by piece.

Objects are `chat.completion`, `chat.completion.chunk` and `text_completion` (OpenAI API reference; openai-python,
`types/chat` and `types/completion*.py`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from partita.library.scheduler import Piece
from partita.runtime.logprobs import TokenLogprobs
from partita.runtime.text import INCOMPLETE, Text

FINISHES = {"stop": "stop", "length": "length", "cache_full": "length"}
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """What one choice has said so far."""

    prompt_tokens: int
    pieces: list[str] = field(default_factory=list)
    """Texts, in order."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None

    def take(self, piece: Piece, *, keep: bool) -> None:
        """Note a piece; `keep`: its text and log-probabilities, too, for an answer that is sent whole."""
        self.tokens += len(piece.tokens)
        self.finish = piece.finish_reason or self.finish
        if keep:
            self.pieces.append(piece.text)
            self.logprobs += piece.logprobs


class Format(Protocol):
    """How the answers of one endpoint are written."""

    prefix: str
    """Of the id."""
    whole: str
    """Type of an answer."""
    part: str
    """Type of a piece of one."""

    def said(self, text: str, logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """A choice that is whole, without its index and its end; `offset`: characters before it."""

    def opening(self) -> dict[str, Any] | None:
        """What the stream of a choice begins with; None: nothing."""

    def delta(self, text: str, logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """A piece of a choice."""

    def length(self, logprobs: Sequence[TokenLogprobs]) -> int:
        """Characters of tokens, by which places of those behind them are told."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens as texts."""

    text: Text
    ends: frozenset[int]
    """Those that end an answer and are no part of what it says."""

    def said(self, entries: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Without the token that ended the answer."""
        return [entry for entry in entries if entry.token not in self.ends]

    def written(self, token: int) -> str:
        """A token as it reads behind others; a special one by its name."""
        return self.text.written(token)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """`/v1/chat/completions`."""

    tokens: Tokens
    wanted: bool
    """Log-probabilities."""
    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def said(self, text: str, logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """The assistant's message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(logprobs)}

    def opening(self) -> dict[str, Any] | None:
        """Who speaks."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, text: str, logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """More of the message."""
        return {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(logprobs)}

    def length(self, logprobs: Sequence[TokenLogprobs]) -> int:
        """None: no places are told."""
        return 0

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.wanted:
            return None
        content = [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(token, value) for token, value in entry.top],
            }
            for entry in self.tokens.said(entries)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.tokens.written(token)
        # A part of a character has bytes that the tokenizer does not tell.
        known = INCOMPLETE not in text
        return {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode("utf-8")) if known else None,
        }


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """`/v1/completions`."""

    tokens: Tokens
    wanted: bool
    """Log-probabilities."""
    prefix = "cmpl-"
    whole = "text_completion"
    part = "text_completion"

    def said(self, text: str, logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """The text."""
        return {"text": text, "logprobs": self._logprobs(logprobs, offset)}

    def opening(self) -> dict[str, Any] | None:
        """Nothing."""
        return None

    def delta(self, text: str, logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """More of the text."""
        return self.said(text, logprobs, offset)

    def length(self, logprobs: Sequence[TokenLogprobs]) -> int:
        """Of tokens that are told."""
        return sum(len(self.tokens.written(entry.token)) for entry in self.tokens.said(logprobs)) if self.wanted else 0

    def _logprobs(self, entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any] | None:
        if not self.wanted:
            return None
        kept = self.tokens.said(entries)
        texts = [self.tokens.written(entry.token) for entry in kept]
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset))[: len(texts)]
        top = []
        for text, entry in zip(texts, kept, strict=True):
            likely: dict[str, float] = {}
            for token, value in entry.top:  # of tokens that read alike the likeliest, which comes first
                likely.setdefault(self.tokens.written(token), value)
            top.append(likely | {text: entry.logprob})
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in kept],
            "top_logprobs": top,
            "text_offset": offsets,
        }


class Answer:
    """One answer on its way: its head, and the objects that are made of its choices."""

    def __init__(
        self, form: Format, model: str, fingerprint: str, echoes: Sequence[str], *, usage: bool, each: int = 1
    ) -> None:
        """`echoes`: text that each choice begins with. `usage`: told at the end of a stream. `each`: choices of every
        prompt.
        """
        self.form, self._echoes, self._usage, self._each = form, echoes, usage, each
        self.identity = f"{form.prefix}{secrets.token_hex(12)}"
        self._head = {"id": self.identity, "created": int(time.time()), "model": model}
        self._fingerprint = fingerprint
        self._offsets = [len(echo) for echo in echoes]
        """Characters of the tokens of each choice so far; their texts may be held back, for a stop string."""

    def finished(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer as one object."""
        listed = [
            {
                "index": index,
                **self.form.said(echo + "".join(choice.pieces), choice.logprobs, len(echo)),
                "finish_reason": FINISHES.get(choice.finish or "", choice.finish),
            }
            for index, (choice, echo) in enumerate(zip(choices, self._echoes, strict=True))
        ]
        return {
            **self._head,
            "object": self.form.whole,
            "system_fingerprint": self._fingerprint,
            "choices": listed,
            "usage": usage(choices, self._each),
        }

    def openings(self) -> list[bytes]:
        """What the stream begins with."""
        events = []
        for index, echo in enumerate(self._echoes):
            opening = self.form.opening()
            if opening is not None:
                events.append(self._event([{"index": index, **opening, "finish_reason": None}]))
            if echo:
                events.append(self._event([{"index": index, **self.form.delta(echo, (), 0), "finish_reason": None}]))
        return events

    def piece(self, index: int, piece: Piece) -> bytes | None:
        """The event for the next piece of a choice; None when nobody would see anything."""
        if not (piece.text or piece.finish_reason or (piece.logprobs and self.form_wants_logprobs)):
            return None
        offset = self._offsets[index]
        self._offsets[index] += self.form.length(piece.logprobs)
        finish = FINISHES.get(piece.finish_reason or "", piece.finish_reason)
        return self._event(
            [{"index": index, **self.form.delta(piece.text, piece.logprobs, offset), "finish_reason": finish}]
        )

    @property
    def form_wants_logprobs(self) -> bool:
        """Whether log-probabilities are told."""
        return bool(getattr(self.form, "wanted", False))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """What the stream ends with."""
        return (self._event([], usage(choices, self._each)) if self._usage else b"") + DONE

    def _event(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        record = {
            **self._head,
            "object": self.form.part,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            **({"usage": used} if self._usage else {}),
        }
        return event(record)


def usage(choices: Sequence[Choice], each: int) -> dict[str, Any]:
    """Tokens of prompts and of answers; a prompt with several choices counts once, as in OpenAI's API. `each`: choices
    of every prompt, which are beside each other.
    """
    prompt, new = sum(choice.prompt_tokens for choice in choices[::each]), sum(choice.tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def event(record: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(record) + b"\n\n"


def to_json(record: Any) -> bytes:
    """A JSON object on one line, in UTF-8."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )
