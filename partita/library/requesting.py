"""A request for `Model.scheduler`, as programs ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from partita.errors import GenerationError, UsageError
from partita.library.asking import options, prompt_rows, stops
from partita.library.edge import method_takes
from partita.library.model import Model
from partita.library.requests import Work
from partita.options.generation import RequestOptions
from partita.options.sampling import Sampling


@method_takes(RequestOptions)
def request(model: Model, given: RequestOptions) -> Work:
    """What one request asks for, to be given to `submit` of `model.scheduler()`. Nothing is run.

    The arguments are those of `Model.generate`, for one prompt. `logprobs`: pieces tell how likely each new token was,
    with so many of the likeliest; `adapter`: None for that of the scheduler. Raises ArgumentError, GenerationError for
    an empty prompt, PackageError without the tokenizer that a text needs.
    """
    full = options(Sampling(**given.figures()), given.sampling, 1, model.folder)[0]
    has_text = model.tokenizer is not None
    texts, ids = stops(model.folder, given.stop, given.stop_token_ids, vocab_size=model.vocab_size, has_text=has_text)
    prompt = _encoded(model, given.prompt)
    return Work(prompt, full, texts, tuple(sorted(ids)), given.logprobs, given.adapter)


def _encoded(model: Model, prompt: str | Sequence[int]) -> tuple[int, ...]:
    """The token ids of a prompt. Raises GenerationError for an empty text, UsageError for several prompts."""
    rows = prompt_rows(prompt)
    if len(rows) != 1:
        raise UsageError(f"`prompt` has {len(rows)} prompts; a request has one: make one for each of them")
    row = rows[0]
    if not row:
        raise GenerationError("the prompt is empty; give some text to continue")
    return tuple((model.tokenizer or model).encode(row)) if isinstance(row, str) else row
