"""A row of a prompt file, its request, and its row of the answer file.

A row is an object of plain values in every file format, and independent of files and packages, so that rows can be read
in one process and answered in another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from partita.errors import GenerationError, PartitaError, UsageError
from partita.library.engine.requests import CompletionResult, Work, checked_stop_ids, conversations, is_list
from partita.library.sampling import SEED_BITS, Sampling
from partita.messages import as_field, rename_options
from partita.observations.text_format import listing
from partita.options.fields import check_fields, describe_fields
from partita.options.generation import GREEDY
from partita.runtime.generate.choice.sampling import TokenLogprobs
from partita.runtime.generate.prefix_file import PrefixContent, ids_after, prompt_after, system_of
from partita.runtime.generate.text.chat_templates import OTHER_NAMES, Message, conversation
from partita.runtime.generate.text.stop_strings import check_stops
from partita.runtime.generate.text.tokens import Text

PROMPTS = ("prompt", "messages", "tokens")
"""Prompt fields; a row has one of them."""
IDS = ("id", "custom_id", "key")
"""Names of the id field; the first one present counts."""
SAMPLED = tuple(GREEDY.figures())
WHOLE = tuple(each.name for each in describe_fields(Sampling) if each.type is int)
"""Integer options."""
ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
"""OpenAI's names."""
OTHERS = ("stop", "stop_token_ids", "logprobs", "system", "adapter")
FIELDS = frozenset({*PROMPTS, *IDS, *SAMPLED, *ALIASES, *OTHERS})
"""Every field of a row."""
MOST_LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class InputRow:
    """A row of a prompt file."""

    index: int
    """0-based position in the file."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are not null."""
    error: str | None = None
    """Why the row could not be read."""

    @property
    def key(self) -> str | int | None:
        """Its id; None without one, or if it is neither a string nor an integer."""
        found = _as_whole(next((self.data[name] for name in IDS if name in self.data), None))
        return found if isinstance(found, str) or _is_whole(found) else None

    @property
    def fields(self) -> dict[str, str]:
        """Field names of the row by the argument that each sets."""
        return {ALIASES.get(name, name): name for name in self.data if name in FIELDS}


@dataclass(frozen=True, slots=True)
class RowDefaults:
    """Options of rows without their own."""

    sampling: Sampling
    """With all values set. A row that samples without a seed gets one from `base_seed` and its index."""
    base_seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    chat: bool = False
    """Prompts are user messages."""
    system: str | None = None
    prefix: PrefixContent | None = None
    """Text or token ids before every prompt."""

    def identity(self) -> dict[str, Any]:
        """The options as JSON, for the journal; a prefix is hashed."""
        prefix = None if self.prefix is None else hashlib.sha256(json.dumps(asdict(self.prefix)).encode()).hexdigest()
        others = {name: getattr(self, name) for name in ("stop", "stop_ids", "chat", "system")}
        return {**self.sampling.figures(), **others, "prefix": prefix}


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """A row of an answer file."""

    index: int
    id: str | int | None
    text: str | None
    """None without a tokenizer, and for a rejected row."""
    tokens: tuple[int, ...]
    prompt_tokens: int | None
    finish_reason: str
    """stop, length, cache_full, or error."""
    seed: int | None
    """None for greedy rows."""
    error: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """None unless requested."""

    def to_line(self) -> bytes:
        """The line of an answer file, with `logprobs` only if requested."""
        record = asdict(self)
        if self.logprobs is None:
            del record["logprobs"]
        return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def check_defaults(defaults: RowDefaults, text: Text | None) -> None:
    """Raise the error that every row without its own options would have: UsageError without a chat template, and for a
    prefix of text without a tokenizer; GenerationError for a system message that the template rejects.
    """
    if text is None:
        ids_after(defaults.prefix, ())
    elif defaults.chat or defaults.system is not None:
        system = defaults.system if defaults.prefix is None else system_of(defaults.prefix)
        text.encode_messages(conversation("1", system))


def work_of(row: InputRow, defaults: RowDefaults, text: Text | None, vocab_size: int) -> Work:
    """The request of a row. Raises GenerationError and UsageError."""
    if row.error is not None:
        raise GenerationError(row.error)
    data = row.data
    if unknown := sorted(data.keys() - FIELDS):
        raise UsageError(f"unknown field {listing(unknown)}; docs/batches.md lists the fields of a row")
    if row.key is None and any(name in data for name in IDS):
        raise UsageError("the id of a row must be a string or an integer")
    given = [name for name in PROMPTS if name in data]
    if len(given) != 1:
        names = listing(given) if given else "none"
        raise UsageError(f"a row needs exactly one of {', '.join(PROMPTS)}; this row has {names}")
    logprobs, ids = _as_whole(data.get("logprobs")), data.get("stop_token_ids")
    if logprobs is not None and (not _is_whole(logprobs) or not 0 <= logprobs <= MOST_LOGPROBS):
        raise UsageError(f"logprobs is {logprobs!r}; it must be an integer from 0 to {MOST_LOGPROBS}")
    return Work(
        prompt=_tokens(data, given[0], defaults, text),
        sampling=_sampling(row, defaults),
        stop=_stops(data, defaults),
        # Those of a checkpoint may be outside its vocabulary; they are never generated.
        stop_ids=defaults.stop_ids if ids is None else tuple(checked_stop_ids(_ids(ids, "stop_token_ids"), vocab_size)),
        logprobs=logprobs,
        adapter=_text(data, "adapter"),
    )


def answer_row(
    row: InputRow, answer: CompletionResult, logprobs: Sequence[TokenLogprobs] | None, *, with_text: bool
) -> AnswerRow:
    """The answer row of a finished request. `with_text`: the package has a tokenizer."""
    return AnswerRow(
        row.index,
        row.key,
        answer.text if with_text else None,
        answer.tokens,
        answer.prompt_tokens,
        answer.finish_reason or "interrupted",
        answer.sampling.seed if answer.sampling.temperature else None,
        None,
        None if logprobs is None else tuple(logprobs),
    )


def error_row(row: InputRow, error: PartitaError) -> AnswerRow:
    """The answer row for an error, whose message uses the row's field names."""
    message = rename_options(str(error), row.fields, as_field)
    return AnswerRow(row.index, row.key, None, (), None, "error", None, " ".join(message.split()))


def _tokens(data: Mapping[str, Any], given: str, defaults: RowDefaults, text: Text | None) -> tuple[int, ...]:
    """The prompt as token ids."""
    value, prefix = data[given], defaults.prefix
    if given != "messages" and is_list(value):
        if data.get("system") is not None:
            raise UsageError(f"system cannot be put before token ids; pass {given} as text, or omit system")
        return ids_after(prefix, _ids(value, given))
    if given == "messages" and any(isinstance(each, str) for each in (value if is_list(value) else [value])):
        raise UsageError(f"messages is {str(value)[:40]!r}; it must be a list of objects with role and content")
    if given == "tokens":
        _ids(value, given)
    if given == "prompt":
        _text(data, given)
    if text is None:
        raise UsageError(f"{given} is text, but no tokenizer is used; pass token ids in the field tokens")
    system = _text(data, "system") if "system" in data else defaults.system
    if prefix is not None and system is not None:
        raise UsageError("the prefix already includes the system message; omit system")
    if prefix is not None and given != "messages":
        return prompt_after(prefix, value, text, chat=defaults.chat)
    if prefix is not None:
        system = system_of(prefix)
    if given == "messages" or defaults.chat or system is not None:
        fixed = prefix is not None or "system" in data
        return tuple(text.encode_messages(_conversation(value, system, fixed=fixed)))
    if not value:
        raise GenerationError("the prompt is empty; pass text to continue")
    return tuple(text.encode(value))


def _conversation(value: Any, system: str | None, *, fixed: bool) -> list[Message]:
    """The messages of a row, after the system message unless they begin with one; `fixed`: only `system` may be it."""
    several = conversations(value)
    if len(several) != 1:
        raise UsageError("messages contains several conversations; a row has one")
    (messages,) = several
    role = messages[0]["role"]
    own = messages[0]["content"] if OTHER_NAMES.get(role, role) == "system" else None
    if own is not None and fixed and own != system:
        raise UsageError("messages begins with a system message, but system sets another; omit one of them")
    return messages if own is not None or system is None else [{"role": "system", "content": system}, *messages]


def _sampling(row: InputRow, defaults: RowDefaults) -> Sampling:
    """The row's options over the defaults, with its own seed if it samples."""
    named: dict[str, Any] = {}
    for name, value in row.data.items():
        option = ALIASES.get(name, name)
        if option in named and named[option] != value:
            raise UsageError(f"{name} is {value}, but an alias of it in the same row is {named[option]}; keep one")
        named[option] = value
    named |= {name: _as_whole(named[name]) for name in WHOLE if name in named}
    requested = check_fields(Sampling(**{name: named[name] for name in SAMPLED if name in named}))
    full = requested.with_defaults(defaults.sampling)
    if not full.temperature or requested.seed is not None:
        return full
    return replace(full, seed=row_seed(defaults.base_seed, row.index))


def row_seed(base: int, index: int) -> int:
    """The seed of a row without one; depends only on the run's seed and the row's index."""
    return (base + index) % (1 << SEED_BITS)


def _stops(data: Mapping[str, Any], defaults: RowDefaults) -> tuple[str, ...]:
    value = data.get("stop", defaults.stop)
    listed = (value,) if isinstance(value, str) else value
    if not is_list(listed) or not all(isinstance(text, str) for text in listed):
        raise UsageError(f"stop is {str(value)[:40]!r}; it must be a string or a list of strings")
    check_stops(listed)
    return tuple(listed)


def _text(data: Mapping[str, Any], name: str) -> str | None:
    """A field that holds text, if it is there."""
    value = data.get(name)
    if value is None or isinstance(value, str):
        return value
    raise UsageError(f"{name} is {str(value)[:40]!r}; it must be a string")


def _ids(value: Any, name: str) -> list[int]:
    """A field that holds token ids."""
    ids = [_as_whole(token) for token in value] if is_list(value) else []
    if not is_list(value) or not all(map(_is_whole, ids)):
        raise UsageError(f"{name} is {str(value)[:40]!r}; it must be a list of token ids")
    return ids


def _as_whole(value: Any) -> Any:
    """7.0 as 7: an integer table column with missing values holds floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
