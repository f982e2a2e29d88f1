"""Runs a prompt file: its rows through the engine, their answers into the journal, then into the output."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from partita.errors import GenerationError, UsageError
from partita.files import refuse_same, reserve
from partita.library.api import public
from partita.library.batches.journal import GOES_ON, Journal, contents_hash, journal_path
from partita.library.batches.prompt_files import (
    ANSWER_FORMATS,
    PROMPT_FORMATS,
    InputFile,
    check_unchanged,
    format_of,
    import_arrow,
    scan_file,
    unchanged_rows,
    write_table,
)
from partita.library.batches.rows import (
    AnswerRow,
    InputRow,
    RowDefaults,
    answer_row,
    check_defaults,
    error_row,
    work_of,
)
from partita.library.engine.base import Engine
from partita.library.engine.requests import RequestOutput, Ticket, complete_samplings, stop_conditions
from partita.library.model import Model
from partita.library.sampling import SEED_BITS, Sampling
from partita.observations.records import Record
from partita.observations.text_format import plural
from partita.options.generation import TokenIds
from partita.runtime.generate.choice.sampling import TokenLogprobs
from partita.runtime.generate.text.tokens import Text

Answer = Callable[[Iterator[InputRow], RowDefaults], Iterator[AnswerRow]]
"""Answers rows, in any order; see `run_file`."""
AHEAD = 64
"""Minimum number of rows that wait in the engine."""
PIPE = Path("-")
"""Value of `input` for JSON Lines from stdin."""
MOST_NAMED = 5


class BatchRunResult(Record):
    """The result of a run over a prompt file. All figures after `resumed` are of this run."""

    output: Path
    rows: int
    errors: int
    """Rows whose answer is an error."""
    resumed: int
    """Rows that an earlier run answered."""
    prompt_tokens: int
    new_tokens: int
    seconds: float
    """From the first row read to the output, in seconds."""
    rows_per_second: float | None
    """None if it answered no row."""
    tokens_per_second: float | None
    """New tokens per second; None without new tokens."""
    seed: int
    """Seed of the run, from which rows that sample without a seed get theirs."""


@dataclass(slots=True)
class Progress:
    """Progress of a run."""

    rows: int
    done: int
    """Answered rows, including those of earlier runs."""
    resumed: int
    tokens: int = 0
    """New tokens of this run's answers, and tokens of their prompts."""
    prompt_tokens: int = 0


def check_files(source: Path, output: Path) -> None:
    """Check names, and that nothing is overwritten, before anything is loaded. `source` may be PIPE.

    Raises UsageError; InstallationError for Parquet without pyarrow.
    """
    formats = [format_of(output, "output", ANSWER_FORMATS)]
    journal = journal_path(output)
    if source != PIPE:
        formats.append(format_of(source, "input", PROMPT_FORMATS))
        if not source.is_file():
            what = "not a regular file, which cannot be read twice" if source.exists() else "no such file"
            raise UsageError(f"`input={source}`: {what}")
        refuse_same(journal, source, "`output`")
    if output.exists() and not journal.exists():
        raise UsageError(f"`output={output}`: exists already; remove it or choose another")
    if "parquet" in formats:
        import_arrow()


def run_file(
    source: InputFile,
    output: Path,
    answer: Answer,
    defaults: RowDefaults,
    *,
    package: str,
    options: dict[str, Any],
    on_progress: Callable[[Progress], object] = lambda _: None,
) -> BatchRunResult:
    """Answer the unanswered rows of `source`, and write all answers to `output`.

    `answer(rows, defaults)` returns the answers, in any order. `package`: hash of the package; it, the input,
    `defaults` and `options` (JSON) identify the run. `on_progress` is called after every answer. Raises UsageError,
    GenerationError, ResourceError and the errors of `answer`; the same call resumes with the answers so far.
    """
    run = {
        "input file": source.sha256,
        "file format": source.format,
        "package files": package,
        **defaults.identity(),
        **options,
    }
    with Journal(output, run, defaults.base_seed, source.rows) as journal:
        began = time.perf_counter()
        progress = Progress(source.rows, len(journal), journal.resumed)
        on_progress(progress)
        rows = (row for row in unchanged_rows(source, journal.path) if row.index not in journal)
        for each in answer(rows, replace(defaults, base_seed=journal.seed)):
            journal.append(each)
            progress.done = len(journal)
            progress.tokens += len(each.tokens)
            progress.prompt_tokens += each.prompt_tokens or 0
            on_progress(progress)
        if missing := journal.missing():
            named = ", ".join(map(str, missing[:MOST_NAMED])) + (", ..." if len(missing) > MOST_NAMED else "")
            raise GenerationError(
                f"{journal.path}: no answer to {plural(len(missing), 'row')} ({named}): their worker processes "
                f"ended; {GOES_ON}"
            )
        check_unchanged(source, journal.path)
        is_table = format_of(output, "output", ANSWER_FORMATS) == "parquet"
        journal.publish(write_table if is_table else lambda file, lines: file.writelines(lines))
        seconds = time.perf_counter() - began
        done = source.rows - journal.resumed
        return BatchRunResult(
            output=output,
            rows=source.rows,
            errors=journal.errors,
            resumed=journal.resumed,
            prompt_tokens=progress.prompt_tokens,
            new_tokens=progress.tokens,
            seconds=seconds,
            rows_per_second=done / seconds if done and seconds else None,
            tokens_per_second=progress.tokens / seconds if progress.tokens and seconds else None,
            seed=journal.seed,
        )


def run_rows(
    rows: Iterable[InputRow], defaults: RowDefaults, engine: Engine, text: Text | None, vocab_size: int
) -> Iterator[AnswerRow]:
    """Answer rows with an engine that has an open batch; yields answers as rows finish.

    A row's own error is its answer. Raises errors that end the run (ProviderError and other errors of the model,
    KeyboardInterrupt); rows that were running have no answer then.
    """
    done: deque[AnswerRow] = deque()
    open_tickets: set[Ticket] = set()

    def submit(row: InputRow) -> None:
        logprobs: list[TokenLogprobs] = []

        def receive(ticket: Ticket, piece: RequestOutput) -> None:
            logprobs.extend(piece.logprobs)
            if piece.finish_reason is not None:
                open_tickets.discard(ticket)
            if piece.finish_reason in (None, "interrupted") or engine.lost_by is not None:
                return
            if ticket.error is not None:
                done.append(error_row(row, ticket.error))
            else:
                requested = None if ticket.work.logprobs is None else logprobs
                done.append(answer_row(row, ticket.result, requested, with_text=text is not None))

        try:
            work = work_of(row, defaults, text, vocab_size)
            open_tickets.add(engine.submit(work, receive))
        except (GenerationError, UsageError) as error:
            if engine.lost_by is None:  # the model was closed
                done.append(error_row(row, error))

    source = iter(rows)
    more = True
    try:
        while True:
            while more and engine.waiting < max(AHEAD, engine.slots) and len(done) < AHEAD:
                row = next(source, None)
                more = row is not None
                if row is not None:
                    submit(row)
            stepped = engine.step()
            while done:
                yield done.popleft()
            if engine.lost_by is not None:
                raise engine.lost_by
            if not more and not stepped:
                return
    finally:
        for ticket in open_tickets:
            ticket.cancel()


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
) -> BatchRunResult:
    """Answer every row of a prompt file (.jsonl, .txt, .parquet) into an answer file (.jsonl, .parquet).

    docs/batches.md lists the fields of rows. `sampling` and the arguments after it are defaults of rows; a row that
    samples without a seed gets one from `seed` and its index. `chat`: prompts are user messages. `progress` is called
    after every answer with the numbers of answered rows and of all rows. A row's own error is its answer. An
    interrupted call resumes with its answers so far.

    Raises ArgumentError, also for an existing output or one of another run; GenerationError for an unreadable prompt
    file, InstallationError, ProviderError, ResourceError. The answers so far are kept.
    """
    source, target = Path(input), Path(output)
    reserve(target, "answers", (model.folder, source), option="output")
    check_files(source, target)
    looked = scan_file(source)
    requested = Sampling(max_new_tokens=max_new_tokens, seed=seed)
    full = complete_samplings(requested, sampling, 1, model.folder, of_file=True)[0]
    text = model.tokenizer
    texts, ids = stop_conditions(model.folder, stop, stop_token_ids, model.vocab_size, has_text=text is not None)
    given = seed if sampling is None or isinstance(sampling, str) or sampling.seed is None else sampling.seed
    base_seed = secrets.randbits(SEED_BITS) if given is None else given
    defaults = RowDefaults(full, base_seed, texts, tuple(sorted(ids)), chat, system)
    check_defaults(defaults, text)
    engine = model.scheduler(prefill_chunk=prefill_chunk, adapter=adapter)
    answer = partial(run_rows, engine=engine, text=text, vocab_size=model.vocab_size)
    return run_file(
        looked,
        target,
        answer,
        defaults,
        package=contents_hash(model.folder, model.manifest),
        options={"seed": given, "adapter": adapter},
        on_progress=lambda at: progress(at.done, at.rows) if progress is not None else None,
    )
