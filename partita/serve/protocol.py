"""Request bodies of `/v1/chat/completions` and `/v1/completions`, as pydantic models, and errors.

Null equals an absent field. An unsupported field of OpenAI or vLLM is rejected, unless its value is neutral. Besides
OpenAI's fields, the models have Partita's sampling options, `stop_token_ids` and `ignore_eos`.

An error is `{"error": {"message", "type", "param", "code"}}` (OpenAI API reference, "Error codes"; openai-python,
`_exceptions.py`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, to_json
from starlette.responses import Response

from partita.errors import GenerationError, PartitaError, UsageError
from partita.library.engine.requests import BETWEEN_PARTS, TEXT_PARTS
from partita.options.fields import Option, Range, describe_fields
from partita.options.generation import Sampling
from partita.runtime.generate.text.stop_strings import MOST_CHARACTERS

INVALID, SERVER, OVERLOADED = "invalid_request_error", "server_error", "overloaded_error"
RETRY_LATER = {"Retry-After": "1"}
DO_NOT_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients retry twice unless this header forbids it (openai-python, `_base_client.py`)."""
MOST_CHOICES, MOST_PROMPTS, MOST_STOPS, MOST_STOP_TOKENS = 128, 2048, 16, 1024
MOST_TOKENS = 1 << 31
MOST_LOGPROBS = 20
"""Maximum alternatives of each token; OpenAI's completions allow 5."""
MOST_FIELDS = 256
COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat may fill the cache."""
SEEDS = 1 << 63
SHOWN = 60
"""Maximum characters of a value in a message."""
LEAST_TEMPERATURE = 1e-3
"""Lower values are greedy, like 0."""
SAMPLING = {each.name: each for each in describe_fields(Sampling) if each.name not in ("max_new_tokens", "source")}
Prompt = str | list[int]


NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens"), (0,)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "include_stop_str_in_output", "return_token_ids"), (False,)),
    **dict.fromkeys(("echo", "continue_final_message", "return_tokens_as_token_ids"), (False,)),
    "continuous_usage_stats": (False,),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("tools", "functions", "documents", "tool_calls", "bad_words"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto", {})),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    "length_penalty": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "response_format": ({"type": "text"},),
}
"""Unsupported fields, and their values that do not change a completion."""
IGNORED = frozenset(
    {
        *("user", "priority", "request_id", "cache_salt", "cache_prompt", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("parallel_tool_calls", "include_obfuscation"),
    }
)
"""Fields about the service."""


def _has_effect(name: str, value: Any) -> bool:
    """Whether a field of a request body is not absent, ignored or neutral."""
    if name == "logit_bias" and isinstance(value, dict):
        return any(value.values())
    # 0 and False are equal in Python, but not in JSON.
    neutral = (value == good and isinstance(value, bool) == isinstance(good, bool) for good in NEUTRAL.get(name, ()))
    return value is not None and name not in IGNORED and not any(neutral)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[Prompt]:
    """A string, token ids, or a list of strings or of lists of token ids."""
    expected = "expected a string, an array of strings, an array of token ids, or an array of these"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", expected)
    if not value:
        raise PydanticCustomError("too_short", "the array is empty")
    if all(type(entry) is int for entry in value):
        return [value]
    if len(value) > MOST_PROMPTS:
        raise PydanticCustomError("invalid_value", f"{len(value):,} prompts; at most {MOST_PROMPTS:,} are accepted")
    if all(isinstance(entry, str) for entry in value) or all(
        isinstance(entry, list) and all(type(token) is int for token in entry) for entry in value
    ):
        return value
    raise PydanticCustomError("prompt_type", expected)


def _parts(value: Any) -> Any:
    """Contents of a message as a list of parts."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        return value
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]


class Model(BaseModel):
    """An object of a request body."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_no_ops(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        present = {name: value for name, value in data.items() if _has_effect(name, value)}
        if len(present) > MOST_FIELDS:
            raise PydanticCustomError("invalid_value", f"the object has more than {MOST_FIELDS} fields")
        for name in present.keys() & NEUTRAL.keys() - cls.model_fields.keys():
            allowed = " or ".join(map(repr, NEUTRAL[name]))
            raise _of_field("unsupported_value", name, f"this server supports only {allowed}; omit it")
        return present


class StreamOptions(Model):
    """`stream_options`."""

    include_usage: bool = False


class ContentPart(Model):
    """A part of a message."""

    model_config = ConfigDict(extra="ignore")
    type: Literal[*TEXT_PARTS]  # type: ignore[valid-type]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class Message(Model):
    """A message of a chat."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[list[ContentPart], FailFast(), BeforeValidator(_parts)]
    name: str | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message for a chat template."""
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        content = BETWEEN_PARTS.join(part.text for part in self.content)
        return {"role": self.role, "content": content, **{key: value for key, value in given.items() if value}}


def _sampling_field(each: Option) -> Any:
    limits = each.range or Range()
    least, most = (value if math.isfinite(value) else None for value in (limits.minimum, limits.maximum))
    return Annotated[each.type | None, Field(ge=least, le=most)], None


SamplingBody: Any = create_model(
    "SamplingBody", __base__=Model, **{name: _sampling_field(each) for name, each in SAMPLING.items()}
)
"""The sampling options of Partita. The subclass narrows the options that OpenAI's API has."""


class CompletionsBase(SamplingBody):  # type: ignore[misc]
    """Fields of both endpoints."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]],
        Field(max_length=MOST_STOPS),
        BeforeValidator(_as_list),
    ] = []
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=MOST_STOP_TOKENS)] = []
    ignore_eos: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST_TOKENS)
    seed: int | None = Field(None, ge=-SEEDS, lt=SEEDS)

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of a completion; empty for a chat."""
        found: list[Prompt] = getattr(self, "prompt", [])
        return found

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives with log-probabilities; None: no log-probabilities."""
        return None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> dict[str, Any]:
        """The sampling options that are set, by the names of `Sampling`."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        if given.get("temperature", 1) < LEAST_TEMPERATURE:
            given["temperature"] = 0.0
        if given.get("top_k") == -1:
            given["top_k"] = 0  # off, in other servers' notation
        if given.get("top_p") == 0:
            given |= {"top_p": 1.0, "temperature": 0.0}
        if "seed" in given:
            given["seed"] %= 2 * SEEDS  # NumPy's generators reject negative seeds
        return given

    @model_validator(mode="after")
    def _check_stream(self) -> CompletionsBase:
        if self.stream_options is not None and not self.stream:
            raise _of_field("invalid_value", "stream_options", "it is only allowed when 'stream' is true")
        return self


class ChatRequest(CompletionsBase):
    """The request body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """The newer name of `max_tokens`."""
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    add_special_tokens: Literal[False] = False

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives with log-probabilities; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if self.top_logprobs and not self.logprobs:
            raise _of_field("invalid_value", "top_logprobs", "it requires 'logprobs' to be true")
        return self


class CompletionRequest(CompletionsBase):
    """The request body of `/v1/completions`."""

    max_tokens: int | None = Field(COMPLETION_TOKENS, ge=1, le=MOST_TOKENS)
    prompt: Annotated[Any, BeforeValidator(_prompts)]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)
    echo: bool = False
    add_special_tokens: Literal[True] = True

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives with log-probabilities; None: no log-probabilities."""
        return self.logprobs

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            message = f"this server supports only the value of 'n', {self.n}; omit it"
            raise _of_field("unsupported_value", "best_of", message)
        if self.echo and self.logprobs is not None:
            message = "this server does not support log-probabilities of an echoed prompt"
            raise _of_field("unsupported_value", "logprobs", message)
        return self


Kind = TypeVar("Kind", bound=CompletionsBase)


def read_body(kind: type[Kind], data: bytes) -> Kind:
    """Parse a request body. Raises ApiError for the first error."""
    try:
        found: Kind = kind.model_validate_json(data.removeprefix(b"\xef\xbb\xbf"))
        return found
    except ValidationError as error:
        raise _api_error(error, kind) from None


def _of_field(code: str, name: str, message: str) -> PydanticCustomError:
    """An error of a check of several fields, reported for one of them."""
    return PydanticCustomError(code, "{message}", {"message": message, "param": name})


def _api_error(error: ValidationError, kind: type[CompletionsBase]) -> ApiError:
    first = error.errors(include_url=False)[0]
    what, message, context = first["type"], first["msg"], first.get("ctx", {})
    message = message[:1].lower() + message[1:]
    if what == "json_invalid":
        return invalid(f"The body is not JSON: {context['error']}.", code="invalid_json")
    steps = (*first["loc"], *filter(None, [context.get("param")]))
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)[1:]
    given = f", but it is {value_text(first['input'])}" if "param" not in context else ""
    if not param:
        return invalid(f"The body must be a JSON object: {message}.", code="invalid_type")
    if what == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if what == "extra_forbidden":
        name = param[:SHOWN]
        near = difflib.get_close_matches(name, kind.model_fields, n=1)  # which compares every character
        hint = f" Did you mean {near[0]}?" if near else ""
        return invalid(f"Unrecognized request argument supplied: {value_text(name)}.{hint}", name, "unknown_parameter")
    if what == "literal_error":
        return invalid(f"Unsupported value: '{param}'; {message}; omit it.", param, "unsupported_value")
    if what == "unsupported_value":
        return invalid(f"Unsupported value: '{param}'; {message}.", param, what)
    if what.endswith("_type"):
        return invalid(f"Invalid type for '{param}': {message}{given}.", param, "invalid_type")
    code = "empty_array" if what == "too_short" else "invalid_value"
    return invalid(f"Invalid '{param}': {message}{given}.", param, code)


def value_text(value: Any) -> str:
    """A value for a message: its beginning, on one line."""
    if isinstance(value, str):
        return repr(value[:SHOWN]) + ("..." if len(value) > SHOWN else "")
    if isinstance(value, (list, dict)):
        return f"{'an array' if isinstance(value, list) else 'an object'} with {len(value):,} entries"
    return str(value)[:SHOWN]


# --- errors -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is rejected, or whose response cannot be completed."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    """Field of the body, e.g. `temperature`, `messages[0].content`."""
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def json_response(record: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response that must not be cached."""
    headers = {"Cache-Control": "no-store", **(headers or {})}
    return Response(to_json(record), status, headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: the body is invalid, or requests an unsupported feature."""
    return ApiError(400, message, param=param, code=code)


def overloaded_error(message: str, code: str) -> ApiError:
    """503: the request may succeed later."""
    return ApiError(503, message, OVERLOADED, code=code, headers=RETRY_LATER)


def timed_out(seconds: float) -> ApiError:
    """504: the request took longer than the server's limit."""
    message = f"The request exceeded the server's time limit of {seconds:g} s; request fewer tokens."
    return ApiError(504, message, "timeout_error", code="request_timeout", headers=DO_NOT_RETRY)


def shutting_down() -> ApiError:
    """503: the server is shutting down."""
    return ApiError(503, "The server is shutting down.", SERVER, code="shutting_down", headers=RETRY_LATER)


def of_error(error: PartitaError, param: str | None = None) -> ApiError:
    """An error of the package for the client, without server paths and remedies."""
    if isinstance(error, (GenerationError, UsageError)):
        return invalid(sentence(error.message), param)
    return run_error(error)


def run_error(error: PartitaError | None) -> ApiError:
    """500: the run of an accepted request failed."""
    message = "The generation failed." if error is None else sentence(error.message)
    headers = DO_NOT_RETRY if isinstance(error, GenerationError) else {}  # caused by the request, e.g. NaN logits
    return ApiError(500, message, SERVER, code="generation_failed", headers=headers)


def sentence(text: str) -> str:
    """A message as one line with a capital letter at the beginning and a full stop."""
    line = " ".join(text.split())
    return f"{line[:1].upper()}{line[1:]}{'' if line.endswith('.') else '.'}"
