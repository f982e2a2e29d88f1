"""What requests have to be so that a package can take them, and what to do about those that are not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from partita.errors import GenerationError, UsageError
from partita.observations.text_format import plural
from partita.remedies import Remedy
from partita.runtime.engine.request import Request
from partita.spelling import spelled

if TYPE_CHECKING:  # the checks of prompts and options are also made where ONNX Runtime is not needed
    from partita.runtime.engine.executor import Executor

_ANEW = ("partita", "export", "{checkpoint}", "{out}")
PLACEHOLDERS = {"checkpoint": "CHECKPOINT", "out": "PACKAGE"}
"""What only the user knows."""
AS_MANY = Remedy("give {count}")
AS_MANY_OR_ANEW = replace(
    AS_MANY, otherwise=Remedy("export the checkpoint for as many", (*_ANEW, "--batch-size", "{batch_size}"))
)
SHORTEN = Remedy("shorten it")
SHORTEN_OR_ANEW = replace(
    SHORTEN, otherwise=Remedy("export the checkpoint with a longer cache", (*_ANEW, "--max-length", "{max_length}"))
)
SHORTEN_OR_ALLOW = replace(
    SHORTEN, otherwise=Remedy("open the folder for longer texts", options=("--max-length", "{max_length}"))
)
SHORTEN_TO_MODEL = Remedy("shorten it: the model supports at most {positions} positions")
BEGIN_WITH_ONE = Remedy("give one or more")
BEGIN = Remedy("give at least one token to begin with")


class RowLimits(Protocol):
    """What a row of a batch can take."""

    @property
    def max_length(self) -> int:
        """N: prompt and answer together, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Of which token ids are below."""

    @property
    def longest(self) -> int | None:
        """What N can be set to where the package is opened; None where its export has decided it."""

    @property
    def model_positions(self) -> int | None:
        """Most positions that the model supports; None where that is unknown."""


def check_requests(
    executor: Executor, requests: Sequence[Request], prefill_chunk: int, *, answered: bool = False
) -> None:
    """Raise GenerationError for prompts that this package cannot take, UsageError for an option that makes no sense.

    `answered`: also for prompts that leave no room for an answer.
    """
    check_prompts(executor, [request.prompt for request in requests], answered=answered)
    check_budget(min(request.max_new_tokens for request in requests))
    check_chunk(prefill_chunk)


def check_budget(max_new_tokens: int) -> None:
    """Raise UsageError for a number of new tokens that makes no sense."""
    if max_new_tokens < 1:
        raise UsageError(f"{spelled('max_new_tokens')} is {max_new_tokens}; it must be at least 1")


def check_chunk(prefill_chunk: int) -> None:
    """Raise UsageError for a number of prompt tokens per run that makes no sense."""
    if prefill_chunk < 1:
        raise UsageError(f"{spelled('prefill_chunk')} is {prefill_chunk}; it must be at least 1")


def check_prompts(executor: Executor, prompts: Sequence[Sequence[int]], *, answered: bool = False) -> None:
    """Raise GenerationError for prompts that this package cannot take; `answered` as for `check_prompt`."""
    batch = executor.rows
    if not prompts:
        raise GenerationError("no prompt was given", remedy=AS_MANY.filled(count=batch))
    if len(prompts) != batch:
        raise GenerationError(
            f"{plural(len(prompts), 'prompt')} for a package of batch size {batch}",
            remedy=AS_MANY_OR_ANEW.filled(count=batch, batch_size=len(prompts), **PLACEHOLDERS),
        )
    for row, prompt in enumerate(prompts):
        where = f"prompt {row + 1}" if batch > 1 else "the prompt"
        check_prompt(prompt, executor.contract, where, answered=answered)


def check_prompt(prompt: Sequence[int], limits: RowLimits, where: str, *, answered: bool = False) -> None:
    """Raise GenerationError for token ids that a row cannot take. `where`: how the message calls it.

    `answered`: an answer is wanted, of which a token at least must have room beside them. The loop itself takes a
    prompt that fills the cache, and adds nothing to it.
    """
    if not len(prompt):
        raise GenerationError(f"{where} is empty", remedy=BEGIN)
    if len(prompt) + answered > limits.max_length:
        full = ", which leaves no room for an answer" if len(prompt) == limits.max_length else ""
        raise GenerationError(
            f"{where} has {len(prompt)} tokens and the cache holds {limits.max_length}{full}",
            remedy=room_for(len(prompt), limits),
        )
    if not (min(prompt) >= 0 and max(prompt) < limits.vocab_size):
        position = next(index for index, token in enumerate(prompt) if not 0 <= token < limits.vocab_size)
        raise GenerationError(
            f"{where} has token id {prompt[position]} at position {position}; the vocabulary has ids 0 to "
            f"{limits.vocab_size - 1}",
        )


def room_for(tokens: int, limits: RowLimits) -> Remedy:
    """What gives a text of so many tokens room, and an answer."""
    most = limits.model_positions if limits.longest is None else limits.longest
    if most is not None and tokens >= most:
        return SHORTEN_TO_MODEL.filled(positions=most)
    wanted = min(1 << tokens.bit_length(), most or sys.maxsize)
    if limits.longest is None:
        return SHORTEN_OR_ANEW.filled(max_length=wanted, **PLACEHOLDERS)
    return SHORTEN_OR_ALLOW.filled(max_length=wanted)
