"""Request bodies of `/v1/chat/completions` and `/v1/completions`, as pydantic models.

An unsupported field that would change the completion is rejected, unless its value is neutral. Null equals an absent
field. Besides OpenAI's fields, the models have Partita's sampling options, `stop_token_ids` and `ignore_eos`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
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
from pydantic_core import PydanticCustomError

from partita.library.engine.requests import BETWEEN_PARTS, TEXT_PARTS
from partita.options.fields import Range, describe_fields
from partita.options.generation import Sampling
from partita.runtime.generate.text.stop_strings import MOST_CHARACTERS
from partita.serve.api_errors import ApiError, invalid

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
SAMPLING = {each.name: each for each in describe_fields(Sampling) if each.name not in ("max_new_tokens", "source")}
Prompt = str | list[int]


def only(*values: Any) -> Any:
    """Type of a field that accepts these values only, because others would change the completion."""

    def check(value: Any) -> Any:
        if not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in values):
            allowed = " or ".join(map(repr, values))
            raise PydanticCustomError("unsupported_value", f"this server supports only {allowed}")
        return value

    return Annotated[Any, AfterValidator(check)]


def _no_bias(value: dict[str, Any]) -> dict[str, Any]:
    if any(value.values()):
        raise PydanticCustomError("unsupported_value", "this server supports only a bias of 0")
    return value


def _in_range(allowed: Range) -> AfterValidator:
    """A validator of a number's range."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            raise PydanticCustomError("invalid_value", "it must be {allowed}", {"allowed": str(allowed)})
        return value

    return AfterValidator(check)


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
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        present = {name: value for name, value in data.items() if value is not None}
        if len(present) > MOST_FIELDS:
            raise PydanticCustomError("invalid_value", f"the object has more than {MOST_FIELDS} fields")
        return present


class StreamOptions(Model):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: Any = None
    continuous_usage_stats: only(False) = None  # type: ignore[valid-type]


class ResponseFormat(Model):
    """`response_format`."""

    model_config = ConfigDict(extra="allow")
    type: only("text")  # type: ignore[valid-type]


class ContentPart(Model):
    """A part of a message."""

    model_config = ConfigDict(extra="ignore")
    type: only(*TEXT_PARTS)  # type: ignore[valid-type]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class Message(Model):
    """A message of a chat."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[list[ContentPart], FailFast(), BeforeValidator(_parts)]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: only([]) = None  # type: ignore[valid-type]
    function_call: only({}) = None  # type: ignore[valid-type]

    def for_template(self) -> dict[str, str]:
        """The message for a chat template."""
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        content = BETWEEN_PARTS.join(part.text for part in self.content)
        return {"role": self.role, "content": content, **{key: value for key, value in given.items() if value}}


class CompletionsBase(Model):
    """Fields of both endpoints."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]],
        Field(max_length=MOST_STOPS),
        BeforeValidator(_as_list),
    ] = []
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=MOST_STOP_TOKENS)] = []
    ignore_eos: bool = False
    temperature: Annotated[float | None, _in_range(Range(1e-3, 2, "0 or from 0.001 to 2", extra_value=0))] = None
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
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool = False

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

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives with log-probabilities; None: no log-probabilities."""
        return self.logprobs

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise _of_field("unsupported_value", "best_of", f"this server supports only the value of 'n', {self.n}")
        if self.echo and self.logprobs is not None:
            message = "this server does not support log-probabilities of an echoed prompt"
            raise _of_field("unsupported_value", "logprobs", message)
        return self


def _same(kind: Any, *names: str) -> dict[str, Any]:
    """Fields of one type."""
    return dict.fromkeys(names, kind)


IGNORED = Annotated[Any, None]
SHARED = {
    **_same(IGNORED, "user", "priority", "request_id", "cache_salt", "cache_prompt"),
    **_same(only(0), "frequency_penalty", "presence_penalty", "min_tokens"),
    "logit_bias": Annotated[dict[str, Any], AfterValidator(_no_bias)],
    "length_penalty": only(1),
    "bad_words": only([]),
    **_same(only(True), "skip_special_tokens", "spaces_between_special_tokens"),
    **_same(only(False), "use_beam_search", "early_stopping", "include_stop_str_in_output"),
    **_same(only(False), "return_token_ids", "return_tokens_as_token_ids"),
}
"""Fields of both endpoints, of OpenAI and vLLM, that are accepted with neutral values."""
OF_CHAT = {
    **_same(IGNORED, "metadata", "store", "service_tier", "safety_identifier"),
    **_same(IGNORED, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    **_same(only([]), "tools", "functions", "documents"),
    **_same(only("none", "auto"), "tool_choice", "function_call"),
    **_same(only(False), "continue_final_message", "add_special_tokens", "echo"),
    "modalities": only(["text"]),
    "reasoning_effort": only("none"),
    "verbosity": only("medium"),
    "add_generation_prompt": only(True),
    "chat_template_kwargs": only({}),
}
OF_COMPLETION = {"add_special_tokens": only(True), "suffix": only("")}
Kind = TypeVar("Kind", bound=CompletionsBase)


def _complete(kind: type[Kind], others: Mapping[str, Any]) -> type[Kind]:
    """The model with missing sampling options added, and the fields of `others`."""
    sampling = {
        name: Annotated[each.type, _in_range(each.option.range or Range())]
        for name, each in SAMPLING.items()
        if name not in kind.model_fields
    }
    every: dict[str, Any] = {name: (hint, None) for name, hint in {**sampling, **SHARED, **others}.items()}
    return create_model(kind.__name__, __base__=kind, **every)


CHAT = _complete(ChatRequest, OF_CHAT)
COMPLETION = _complete(CompletionRequest, OF_COMPLETION)


def read_body(kind: type[Kind], data: bytes) -> Kind:
    """Parse a request body. Raises ApiError for the first error."""
    try:
        return kind.model_validate_json(data.removeprefix(b"\xef\xbb\xbf"))
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
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])[1:]
    given = f", but it is {value_text(first['input'])}" if param else ""
    param = param or context.get("param", "")
    if not param:
        return invalid(f"The body must be a JSON object: {message}.", code="invalid_type")
    if what == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if what == "extra_forbidden":
        name = param[:SHOWN]
        near = difflib.get_close_matches(name, kind.model_fields, n=1)  # which compares every character
        hint = f" Did you mean {near[0]}?" if near else ""
        return invalid(f"Unrecognized request argument supplied: {value_text(name)}.{hint}", name, "unknown_parameter")
    if what == "unsupported_value":
        return invalid(f"Unsupported value: '{param}'; {message}{given}; omit it.", param, what)
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
