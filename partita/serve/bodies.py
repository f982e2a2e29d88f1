"""The body of a request: JSON of a client -> what it asks for. Knows OpenAI's fields, and nothing of models.

A field that this server does not have is refused unless what it asks for is what the server does anyway: an answer that
ignores a penalty or a tool is another answer than the one that was asked for. Beyond OpenAI's fields it takes `top_k`,
`min_p`, `repetition_penalty`, `stop_token_ids` and `ignore_eos`, by the names that other servers have for them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from partita.options import sampling_options
from partita.serve.api_errors import ApiError, invalid
from partita.serve.fields import (
    SHOWN,
    Reader,
    flag,
    ids,
    ignored,
    is_id,
    json_type,
    lacking,
    number,
    only,
    shown,
    stops,
    text,
    whole,
    wrong_type,
)
from partita.serve.messages import conversation

MOST_CHOICES = 128
MOST_PROMPTS = 2048
MOST_TOKENS = 1 << 31
CHAT_TOP, COMPLETION_TOP = 20, 20
"""Most alternatives beside a token; OpenAI's own completions have up to 5."""
COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; that of a chat is what the cache holds."""
SEEDS = 1 << 63
Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for. None: not said."""

    model: str
    messages: tuple[dict[str, str], ...] = ()
    """Of a chat."""
    prompts: tuple[Prompt, ...] = ()
    """Of a completion."""
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """temperature, top_k, top_p, min_p, repetition_penalty and seed, as far as they were given."""
    logprobs: int | None = None
    """Alternatives beside each token."""
    echo: bool = False


def _stream_options(value: Any, name: str) -> bool:
    """Whether the usage is wanted."""
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    wanted = value.get("include_usage")
    return False if wanted is None else flag(wanted, f"{name}.include_usage")


def _response_format(value: Any, name: str) -> None:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    only("text")(value.get("type"), f"{name}.type")


def _logit_bias(value: Any, name: str) -> None:
    """A bias of 0 changes nothing; another one would change the answer."""
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    read = only(0)
    for bias in value.values():
        read(bias, name)


def _prompts(value: Any, name: str) -> tuple[Prompt, ...]:
    """A text, token ids, or an array of texts or of token ids."""
    expected = "a string, an array of strings, an array of token ids, or an array of these"
    if isinstance(value, str):
        return (text(value, name),)
    if not isinstance(value, list):
        raise wrong_type(name, expected, value)
    if not value:
        raise invalid(f"Invalid '{name}': the array is empty.", name, "empty_array")
    if all(is_id(entry) for entry in value):
        return (tuple(value),)
    if len(value) > MOST_PROMPTS:
        raise invalid(f"Invalid '{name}': {len(value):,} prompts, and at most {MOST_PROMPTS:,} are taken.", name)
    if all(isinstance(entry, str) for entry in value):
        return tuple(text(entry, name) for entry in value)
    if all(isinstance(entry, list) and all(is_id(token) for token in entry) for entry in value):
        return tuple(tuple(entry) for entry in value)
    raise invalid(f"Invalid type for '{name}': expected {expected}, but its entries differ.", name, "invalid_type")


RANGES = {name: option.range for name, option in sampling_options() if option.range is not None}
SHARED: dict[str, Reader] = {
    "model": text,
    "stream": flag,
    "stream_options": _stream_options,
    "n": whole(1, MOST_CHOICES),
    "max_tokens": whole(1, MOST_TOKENS),
    "stop": stops,
    "stop_token_ids": ids,
    "ignore_eos": flag,
    "temperature": number(RANGES["temperature"].least, 2, or_zero=True),
    "top_p": number(0, 1),
    "top_k": whole(-1, MOST_TOKENS),
    "min_p": number(0, 1),
    "repetition_penalty": number(RANGES["repetition_penalty"].least, RANGES["repetition_penalty"].most),
    "seed": whole(-SEEDS, SEEDS - 1),
    "frequency_penalty": only(0),
    "presence_penalty": only(0),
    "logit_bias": _logit_bias,
    "min_tokens": only(0),
    "skip_special_tokens": only(True),
    "user": ignored,
}
"""Fields of both kinds of body."""
ELSEWHERE: dict[str, Reader] = {
    "use_beam_search": only(False),
    "length_penalty": only(1),
    "early_stopping": only(False),
    "bad_words": only([]),
    "include_stop_str_in_output": only(False),
    "spaces_between_special_tokens": only(True),
    "return_token_ids": only(False),
    "return_tokens_as_token_ids": only(False),
    "priority": ignored,
    "request_id": ignored,
    "cache_salt": ignored,
    "cache_prompt": ignored,
}
"""Fields of vLLM's server, and the last of llama.cpp's, that clients of these write out with what they are anyway."""
CHAT: dict[str, Reader] = {
    **SHARED,
    **ELSEWHERE,
    "add_generation_prompt": only(True),
    "continue_final_message": only(False),
    "add_special_tokens": only(False),
    "chat_template_kwargs": only({}),
    "documents": only([]),
    "echo": only(False),
    "prediction": lacking,
    "audio": lacking,
    "web_search_options": lacking,
    "messages": conversation,
    "max_completion_tokens": whole(1, MOST_TOKENS),
    "logprobs": flag,
    "top_logprobs": whole(0, CHAT_TOP),
    "response_format": _response_format,
    "tools": only([]),
    "tool_choice": only("none", "auto"),
    "functions": only([]),
    "function_call": only("none", "auto"),
    "modalities": only(["text"]),
    "reasoning_effort": only("none"),
    "verbosity": only("medium"),
    "parallel_tool_calls": flag,
    "metadata": ignored,
    "store": ignored,
    "service_tier": ignored,
    "safety_identifier": ignored,
    "prompt_cache_key": ignored,
    "prompt_cache_options": ignored,
    "prompt_cache_retention": ignored,
}
COMPLETION: dict[str, Reader] = {
    **SHARED,
    **ELSEWHERE,
    "add_special_tokens": only(True),
    "prompt": _prompts,
    "logprobs": whole(0, COMPLETION_TOP),
    "echo": flag,
    "suffix": only(""),
    "best_of": whole(1, MOST_CHOICES),
}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def read_json(body: bytes) -> dict[str, Any]:
    """The object that a body holds. Raises ApiError for anything else."""
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise invalid(f"The body is not UTF-8 (byte {error.start}).", code="invalid_json") from error
    except RecursionError as error:
        raise invalid("The body is nested too deeply.", code="invalid_json") from error
    except ValueError as error:
        raise invalid(f"The body is not JSON: {error}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, but it is {json_type(value)}.", code="invalid_type")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def read_chat(body: Mapping[str, Any]) -> Asked:
    """What the body of a chat asks for. Raises ApiError."""
    values = _read(body, CHAT, ("model", "messages"))
    top = values.get("top_logprobs")
    if top and not values.get("logprobs"):
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if "max_completion_tokens" in values:
        values["max_tokens"] = values["max_completion_tokens"]
    values["logprobs"] = (top or 0) if values.get("logprobs") else None
    return _asked(values)


def read_completion(body: Mapping[str, Any]) -> Asked:
    """What the body of a completion asks for. Raises ApiError."""
    values = _read(body, COMPLETION, ("model", "prompt"))
    values.setdefault("max_tokens", COMPLETION_TOKENS)
    choices = values.get("n", 1)
    if values.get("best_of", choices) != choices:  # as many as are asked for are all of them
        raise ApiError(
            400,
            f"Unsupported value: 'best_of' is {values['best_of']}, and this server has that of 'n' alone, which is "
            f"{choices}; leave it out.",
            param="best_of",
            code="unsupported_value",
        )
    if values.get("echo") and values.get("logprobs") is not None:
        raise ApiError(
            400,
            "Unsupported: 'echo' with 'logprobs' asks how likely the prompt is, which this server does not compute.",
            param="logprobs",
            code="unsupported_value",
        )
    return _asked(values)


def _read(body: Mapping[str, Any], readers: Mapping[str, Reader], required: tuple[str, ...]) -> dict[str, Any]:
    """Values by field; null is a field that was left out, whatever its name: clients that write all of their settings
    have it for those of other servers and of the other kind of body. Raises ApiError.
    """
    for name in required:
        if body.get(name) is None:
            raise invalid(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    for name, value in body.items():
        if name not in readers and value is not None:
            near = difflib.get_close_matches(name[:SHOWN], readers, n=1)  # which looks at every character
            hint = f" Did you mean {near[0]}?" if near else ""
            said = f"Unrecognized request argument supplied: {shown(name)[1:-1]}.{hint}"
            raise invalid(said, name[:SHOWN].encode("utf-8", "replace").decode(), "unknown_parameter")
    return {name: readers[name](value, name) for name, value in body.items() if value is not None}


def _asked(values: Mapping[str, Any]) -> Asked:
    stream = values.get("stream", False)
    if "stream_options" in values and not stream:
        raise invalid("The 'stream_options' parameter is only allowed when 'stream' is true.", "stream_options")
    return Asked(
        model=values["model"],
        messages=values.get("messages", ()),
        prompts=values.get("prompt", ()),
        stream=stream,
        include_usage=values.get("stream_options", False),
        n=values.get("n", 1),
        max_tokens=values.get("max_tokens"),
        stop=values.get("stop", ()),
        stop_token_ids=values.get("stop_token_ids", ()),
        ignore_eos=values.get("ignore_eos", False),
        sampling=_sampling(values),
        logprobs=values.get("logprobs"),
        echo=values.get("echo", False),
    )


def _sampling(values: Mapping[str, Any]) -> dict[str, float | int]:
    """The sampling settings that were given, as the sampler has them."""
    given: dict[str, float | int] = {name: values[name] for name in SAMPLING if name in values}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # off, as other servers write it
    if given.get("top_p") == 0:  # what is left is the likeliest token
        given |= {"top_p": 1.0, "temperature": 0.0}
    if "seed" in given:
        given["seed"] = int(given["seed"]) % (2 * SEEDS)  # generators take none below 0
    return given
