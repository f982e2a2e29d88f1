"""A request for `Model.scheduler`, as programs ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from partita.errors import GenerationError, UsageError
from partita.library.asking import TokenIds, options, prompt_rows, stops
from partita.library.edge import public
from partita.library.model import Model
from partita.library.requests import Work
from partita.library.sampling import Sampling

Prompt: TypeAlias = str | Sequence[int]
"""A text, or token ids, also as an array."""


@public
def request(
    model: Model,
    prompt: Prompt,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    sampling: Sampling | Literal["checkpoint"] | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: TokenIds | None = None,
    logprobs: int | None = None,
    adapter: str | None = None,
) -> Work:
    """What one request asks for, to be given to `submit` of `model.scheduler()`. Nothing is run.

    The arguments are those of `Model.generate`, for one prompt. `logprobs`: pieces tell how likely each new token was,
    with so many of the likeliest; `adapter`: None for that of the scheduler. Raises ArgumentError, GenerationError for
    an empty prompt, PackageError without the tokenizer that a text needs.
    """
    asked = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed, max_new_tokens)
    full = options(asked, sampling, 1, model.folder)[0]
    has_text = model.tokenizer is not None
    texts, ids = stops(model.folder, stop, stop_token_ids, vocab_size=model.vocab_size, has_text=has_text)
    return Work(_encoded(model, prompt), full, texts, tuple(sorted(ids)), logprobs, adapter)


def _encoded(model: Model, prompt: str | Sequence[int]) -> tuple[int, ...]:
    """The token ids of a prompt. Raises GenerationError for an empty text, UsageError for several prompts."""
    rows = prompt_rows(prompt)
    if len(rows) != 1:
        raise UsageError(f"prompt has {len(rows)} prompts; a request has one: make one for each of them")
    row = rows[0]
    if not row:
        raise GenerationError("the prompt is empty; give some text to continue")
    return tuple((model.tokenizer or model).encode(row)) if isinstance(row, str) else row
