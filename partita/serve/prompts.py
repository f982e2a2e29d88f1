"""Prompts of a request body as token ids, and their requests for the scheduler. Runs in the tokenizer's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.errors import GenerationError, UsageError
from partita.library.engine.requests import Work
from partita.library.sampling import Suggestion, complete_sampling
from partita.options.sampling import Sampling
from partita.runtime.generate.text.tokens import Text, TooLongError
from partita.serve.api_errors import ApiError, invalid, of_error
from partita.serve.protocol import ChatRequest, CompletionsBase, Prompt

DEFAULTS = Suggestion(temperature=1.0)
"""OpenAI's defaults: sample from the unmodified distribution."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Properties of a package for parsing request bodies."""

    text: Text
    max_length: int
    vocab_size: int
    stop_ids: frozenset[int]
    chats: bool
    """Whether the package has a chat template."""
    suggests: Suggestion = DEFAULTS
    """Sampling options that a request does not set."""


def works(body: CompletionsBase, reading: Reading, adapter: str | None = None) -> list[Work]:
    """One request for each choice of the response; choices of a prompt are consecutive.

    `adapter`: one of the package's; None: the server's. Raises ApiError for a prompt that is empty, too long for the
    cache, or rejected by chat template or tokenizer, and for token ids outside the vocabulary.
    """
    limit, most_tokens = reading.max_length, body.max_tokens
    if most_tokens is not None and most_tokens > limit:
        raise invalid(
            f"max_tokens is too large: {most_tokens:,}. This model supports at most {limit:,} tokens for "
            "prompt and completion together.",
            "max_tokens",
        )
    _check_ids(body.stop_token_ids, reading, "stop_token_ids")
    stop_ids = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else reading.stop_ids)
    found: list[Work] = []
    for prompt in _prompts(body, reading):
        room = limit - len(prompt)
        sampling = Sampling(**body.sampling(), max_new_tokens=min(most_tokens or room, room))
        work = Work(
            prompt=prompt,
            sampling=complete_sampling(sampling, reading.suggests),
            stop=tuple(body.stop),
            stop_ids=tuple(sorted(stop_ids)),
            logprobs=body.alternatives,
            adapter=adapter,
        )
        found += [_with_seed(work, len(found) + number) for number in range(body.n)]
    return found


def _with_seed(work: Work, number: int) -> Work:
    """The request with its own seed, because choices with the same seed would be equal."""
    seed = work.sampling.seed
    return work if seed is None or not number else replace(work, sampling=replace(work.sampling, seed=seed + number))


def _prompts(body: CompletionsBase, reading: Reading) -> list[tuple[int, ...]]:
    """Token ids of each prompt; each leaves room for at least one new token. Raises ApiError."""
    if isinstance(body, ChatRequest):
        found = {"messages": _chat(body, reading)}
    else:
        several = len(body.prompts) > 1
        names = [f"prompt[{index}]" if several else "prompt" for index in range(len(body.prompts))]
        found = {name: _encoded(prompt, reading, name) for name, prompt in zip(names, body.prompts, strict=True)}
    for name, prompt in found.items():
        if not prompt:
            raise invalid(f"Invalid '{name}': it is empty; pass text to continue.", name, "empty_string")
        if len(prompt) >= reading.max_length:
            raise invalid(
                f"This model's maximum context length is {reading.max_length:,} tokens of prompt and completion. "
                f"However, '{name}' has {len(prompt):,} tokens. Please reduce its length.",
                name,
                "context_length_exceeded",
            )
    return list(found.values())


def _chat(body: ChatRequest, reading: Reading) -> tuple[int, ...]:
    if not reading.chats:
        raise invalid(
            "This model has no chat template, so it does not support messages; use /v1/completions.",
            "messages",
            "no_template",
        )
    try:
        return tuple(reading.text.encode_messages([message.for_template() for message in body.messages]))
    except (UsageError, GenerationError) as error:
        raise _of_tokenizer(error, "messages") from error


def _encoded(prompt: Prompt, reading: Reading, name: str) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        _check_ids(prompt, reading, name)
        return tuple(prompt)
    try:
        return tuple(reading.text.encode(prompt)) if prompt else ()
    except (UsageError, GenerationError) as error:
        raise _of_tokenizer(error, name) from error


def _of_tokenizer(error: UsageError | GenerationError, name: str) -> ApiError:
    found = of_error(error, name)
    return replace(found, code="context_length_exceeded") if isinstance(error, TooLongError) else found


def _check_ids(ids: Sequence[int], reading: Reading, name: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < reading.vocab_size), None)
    if wrong is not None:
        raise invalid(
            f"Invalid '{name}': {str(wrong)[:30]} is not a token id; valid ids are 0 to {reading.vocab_size - 1:,}.",
            name,
        )
