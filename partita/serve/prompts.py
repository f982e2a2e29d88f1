"""From what a body asks for to work for the scheduler: prompts as token ids, settings with a value for everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.errors import GenerationError, UsageError
from partita.library.sampling import Sampling, completed
from partita.library.scheduler import Work
from partita.runtime.suggested import Suggestion
from partita.runtime.text import Text, TooLongError
from partita.serve.api_errors import ApiError, invalid, of_error
from partita.serve.bodies import Asked, Prompt
from partita.spelling import read_as_fields

DEFAULTS = Suggestion(temperature=1.0)
"""OpenAI's own: a client that says nothing expects draws from the distribution as it is."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What turning bodies into work takes to know of a package."""

    text: Text
    max_length: int
    vocab_size: int
    stop_ids: frozenset[int]
    chats: bool
    """The package has a chat template."""
    suggests: Suggestion = DEFAULTS
    """Settings where a body says nothing."""


def works(asked: Asked, reading: Reading, adapter: str | None = None) -> list[Work]:
    """One work for each choice that the answer is to have, those of a prompt beside each other. `adapter`: one of the
    package's, by name; None: that of the server.

    Raises ApiError for a prompt that is empty, too long for the cache or refused by the chat template or the
    tokenizer, and for token ids that the package has not.
    """
    limit = reading.max_length
    if asked.max_tokens is not None and asked.max_tokens > limit:
        raise invalid(
            f"max_tokens is too large: {asked.max_tokens:,}. This model holds at most {limit:,} tokens of prompt and "
            "answer together.",
            "max_tokens",
        )
    _check_ids(asked.stop_token_ids, reading, "stop_token_ids")
    stop_ids = frozenset(asked.stop_token_ids) | (frozenset() if asked.ignore_eos else reading.stop_ids)
    found = []
    for index, prompt in enumerate(_prompts(asked, reading)):
        most = limit - len(prompt)
        sampling = _sampling(asked, reading.suggests, min(asked.max_tokens or most, most))
        work = Work(
            prompt=prompt,
            sampling=sampling,
            stop=asked.stop,
            stop_ids=tuple(sorted(stop_ids)),
            logprobs=asked.logprobs,
            adapter=adapter,
        )
        found += [_choice(work, index * asked.n + number) for number in range(asked.n)]
    return found


def _choice(work: Work, number: int) -> Work:
    """The work with a seed of its own: choices that are drawn alike would all be the same."""
    seed = work.sampling.seed
    return work if seed is None or not number else replace(work, sampling=replace(work.sampling, seed=seed + number))


def _sampling(asked: Asked, suggests: Suggestion, most: int) -> Sampling:
    try:
        with read_as_fields({name: name for name in asked.sampling}):
            return completed(Sampling(**asked.sampling, max_new_tokens=most), suggests)  # type: ignore[arg-type]
    except UsageError as error:
        raise of_error(error) from error


def _prompts(asked: Asked, reading: Reading) -> Sequence[tuple[int, ...]]:
    """Token ids of each prompt, which leave room for at least one more. Raises ApiError."""
    if asked.messages:
        found = [("messages", _chat(asked, reading))]
    else:
        several = len(asked.prompts) > 1
        names = [f"prompt[{index}]" if several else "prompt" for index in range(len(asked.prompts))]
        found = [(name, _completion(prompt, reading, name)) for name, prompt in zip(names, asked.prompts, strict=True)]
    for name, prompt in found:
        if not prompt:
            raise invalid(f"Invalid '{name}': it is empty; give some text to continue.", name, "empty_string")
        if len(prompt) >= reading.max_length:
            raise invalid(
                f"This model's maximum context length is {reading.max_length:,} tokens, of prompt and answer together. "
                f"However, your {'messages have' if asked.messages else 'prompt has'} {len(prompt):,} tokens. Please "
                "reduce their length.",
                name,
                "context_length_exceeded",
            )
    return [prompt for _, prompt in found]


def _chat(asked: Asked, reading: Reading) -> tuple[int, ...]:
    if not reading.chats:
        raise invalid(
            "This model has no chat template, so it takes no messages; use /v1/completions.", "messages", "no_template"
        )
    try:
        return tuple(reading.text.encode_messages(asked.messages))
    except (UsageError, GenerationError) as error:  # a template may refuse what it is given
        raise _error(error, "messages") from error


def _completion(prompt: Prompt, reading: Reading, name: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        try:
            return tuple(reading.text.encode(prompt)) if prompt else ()
        except (UsageError, GenerationError) as error:
            raise _error(error, name) from error
    _check_ids(prompt, reading, name)
    return prompt


def _error(error: UsageError | GenerationError, name: str) -> ApiError:
    found = of_error(error, name)
    return replace(found, code="context_length_exceeded") if isinstance(error, TooLongError) else found


def _check_ids(ids: Sequence[int], reading: Reading, name: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < reading.vocab_size), None)
    if wrong is not None:
        raise ApiError(
            400,
            f"Invalid '{name}': {str(wrong)[:30]} is no token; the vocabulary has ids 0 to {reading.vocab_size - 1:,}.",
            param=name,
            code="invalid_value",
        )
