"""A file of prompts answered by a loaded package, as programs ask for it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from partita.files import claim
from partita.library.asking import TokenIds, options, stops
from partita.library.audience import LOGGER
from partita.library.batches.filing import FileAnswers, answer_file, check_files
from partita.library.batches.reading import InputFile
from partita.library.batches.rows import RowDefaults
from partita.library.batches.running import BatchRun
from partita.library.edge import public, theirs
from partita.library.model import Model
from partita.library.sampling import SEED_BITS, Sampling
from partita.observations.text_format import listing


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
    progress: Callable[[int, int | None], object] | None = None,
) -> FileAnswers:
    """Answer every row of a file of prompts (.jsonl, .txt, .parquet) into a file of answers (.jsonl, .parquet).

    docs/batches.md has the fields of rows. `sampling` and what follows hold where a row does not say otherwise; `seed`,
    and the place of a row, make the seed of one that draws. `chat`: prompts are messages of the user. `progress` hears
    how many rows are done, and of how many, after every step. What is wrong with a row is its answer. A call that was
    ended before goes on with what it has done.

    Raises ArgumentError, also for an output that exists or is of another run; GenerationError for a file that is none
    of prompts, InstallationError, ProviderError, ResourceError: the answers so far are kept.
    """
    source, target = Path(input), Path(output)
    claim(target, "answers", (model.folder, source), option="output")
    check_files(source, target)
    asked = Sampling(max_new_tokens=max_new_tokens, seed=seed)
    full = options(asked, sampling, 1, model.folder, of_file=True)[0]
    has_text = model.tokenizer is not None
    texts, ids = stops(model.folder, stop, stop_token_ids, vocab_size=model.vocab_size, has_text=has_text)
    given = seed if sampling is None or isinstance(sampling, str) or sampling.seed is None else sampling.seed
    defaults = RowDefaults(
        full,
        secrets.randbits(SEED_BITS) if given is None else given,
        texts,
        tuple(sorted(ids)),
        chat,
        system,
    )
    figures = {**full.figures(), "seed": given}

    def heard(run: BatchRun, looked: InputFile) -> None:
        if progress is not None:
            with theirs():
                progress(len(run.journal), looked.rows)

    done = answer_file(
        source,
        target,
        lambda: model.scheduler(prefill_chunk=prefill_chunk, adapter=adapter),
        model.folder,
        model.manifest,
        model.tokenizer,
        defaults,
        options={**figures, "stop": texts, "chat": chat, "system": system, "adapter": adapter, "stop_ids": sorted(ids)},
        heard=heard,
    )
    if done.unread:
        LOGGER.warning("these fields of the rows were not read: %s", listing(done.unread))
    return done
