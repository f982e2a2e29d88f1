"""A prompt file answered by a loaded package, as programs ask for it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from partita.files import claim
from partita.library.asking import options, stops
from partita.library.batches.reading import look_at
from partita.library.batches.rows import RowDefaults, check_defaults
from partita.library.batches.running import FileAnswers, Progress, answer_file, answers, check_files
from partita.library.contents import contents_hash
from partita.library.edge import public
from partita.library.model import Model
from partita.library.sampling import SEED_BITS, Sampling
from partita.options.generation import TokenIds


@public
def generate_file(
    model: Model,
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    sampling: Sampling | Literal["checkpoint"] | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: TokenIds | None = None,
    chat: bool = False,
    system: str | None = None,
    prefill_chunk: int | None = None,
    adapter: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> FileAnswers:
    """Answer every row of a prompt file (.jsonl, .txt, .parquet) into an answer file (.jsonl, .parquet).

    docs/batches.md has the fields of rows. `sampling` and the arguments after it are defaults of rows; `seed` and the
    place of a row make the seed of a row that draws tokens and has none. `chat`: prompts are the user's messages.
    `progress` is called with the number of answered rows and of all rows after every answer. An error of a row is its
    answer. A call that was ended goes on with the answers that it has.

    Raises ArgumentError, also for an output that exists or is another run's; GenerationError for a prompt file that
    cannot be read, InstallationError, ProviderError, ResourceError: the answers so far are kept.
    """
    source, target = Path(input), Path(output)
    claim(target, "answers", (model.folder, source), option="output")
    check_files(source, target)
    looked = look_at(source)
    asked = Sampling(max_new_tokens=max_new_tokens, seed=seed)
    full = options(asked, sampling, 1, model.folder, of_file=True)[0]
    text = model.tokenizer
    texts, ids = stops(model.folder, stop, stop_token_ids, vocab_size=model.vocab_size, has_text=text is not None)
    given = seed if sampling is None or isinstance(sampling, str) or sampling.seed is None else sampling.seed
    base_seed = secrets.randbits(SEED_BITS) if given is None else given
    defaults = RowDefaults(full, base_seed, texts, tuple(sorted(ids)), chat, system)
    if looked.rows:
        check_defaults(defaults, text, looked.format)
    others = {"stop": texts, "chat": chat, "system": system, "adapter": adapter, "stop_ids": sorted(ids)}

    def heard(at: Progress) -> None:
        if progress is not None:
            progress(at.done, at.rows)

    engine = model.scheduler(prefill_chunk=prefill_chunk, adapter=adapter)
    return answer_file(
        looked,
        target,
        lambda rows, settled: answers(rows, settled, engine, text, model.vocab_size),
        defaults,
        package=contents_hash(model.folder, model.manifest),
        options={**full.figures(), "seed": given, **others},
        heard=heard,
    )
