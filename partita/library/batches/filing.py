"""A file of prompts to a file of answers: which run it is, and going on with one that was ended before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.errors import GenerationError, UsageError
from partita.files import refuse_same
from partita.library.batches.journal import Journal, journal_path
from partita.library.batches.reading import InputFile, format_of, look_at, read_rows, stamp_of
from partita.library.batches.rows import InputRow, RowDefaults, check_defaults, told_unread
from partita.library.batches.running import BatchRun
from partita.library.batches.writing import check_library, is_there, refuse_there, write_answers
from partita.library.contents import contents_hash
from partita.library.scheduler import Scheduler
from partita.package import Manifest
from partita.runtime.text import Text
from partita.spelling import spelled


@dataclass(frozen=True, slots=True)
class FileAnswers:
    """What became of a file of prompts."""

    output: Path
    rows: int
    errors: int
    """Rows without an answer; each says why."""
    resumed: int
    """Rows that had their answer from a run before this one."""
    prompt_tokens: int
    """This and the next: of this run."""
    new_tokens: int
    seconds: float
    """From the first row that is read to the output: what the run is of was looked at before."""
    unread: tuple[str, ...]
    """Fields of rows that mean nothing to Partita."""
    seed: int
    """What rows that draw and have no seed of their own have theirs of."""

    @property
    def rows_per_second(self) -> float | None:
        """Of this run; None when it did nothing."""
        done = self.rows - self.resumed
        return done / self.seconds if done and self.seconds > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of this run; None when it made none."""
        return self.new_tokens / self.seconds if self.new_tokens and self.seconds > 0 else None


PIPE = Path("-")
"""In place of a file of prompts: JSON Lines that come through stdin."""


def check_files(source: Path, output: Path) -> None:
    """Check before anything is loaded what can be: names, and that nothing is written over. `source` may be PIPE.

    Raises UsageError, InstallationError.
    """
    format_of(output, "output", ("jsonl", "parquet"))
    journal = journal_path(output)
    if source != PIPE:
        format_of(source, "input", ("jsonl", "txt", "parquet"))
        if not source.is_file():
            what = "no file that can be read twice" if source.exists() else "no such file"
            raise UsageError(f"{spelled('input', str(source))}: {what}")
        refuse_same(journal, source, spelled("output"))
    if not journal.exists():
        refuse_there(output, journal)
    check_library(output)


def is_finished(output: Path, place: Path, journal: Journal) -> bool:
    """Whether this run has written its answers before, and was killed when only its journal was left to be removed.
    Raises UsageError where the output is of another run. `place`: its absolute path.
    """
    if not output.exists():
        return False
    if len(journal) and is_there(place, journal.answers()):
        return True
    refuse_there(output, journal.path)
    return False


def rows_of(looked: InputFile, journal: Path) -> Iterator[InputRow]:
    """The rows of a file for as long as it is the one that the run is of, so that no answer is to a row of another.

    Raises GenerationError when it has changed, and as `read_rows` does.
    """
    stamp = looked.stamp
    for row in read_rows(looked.path):
        now = stamp_of(looked.path)
        if now != stamp:
            check_unchanged(looked, journal)  # it may be gone, or only touched
            stamp = now
        yield row


def check_unchanged(looked: InputFile, journal: Path) -> None:
    """Raise GenerationError for a file that is another by now: one that was still being written, say. A file that is
    gone was read to its end.
    """
    if looked.path.is_file() and look_at(looked.path).sha256 != looked.sha256:
        raise GenerationError(
            f"{looked.path}: has changed while its rows were answered; the answers so far, to rows of before, are in "
            f"{journal}: put the file back as it was and run the same command again, or remove them"
        )


def identity(source: InputFile, package: str, options: dict[str, Any]) -> dict[str, Any]:
    """What makes a run this one: the rows, the package (its hash), and options that make a difference to an answer. The
    same bytes are other rows in another format.
    """
    return {
        "input file": {"sha256": source.sha256, "bytes": source.size_bytes, "format": source.format},
        "package": package,
        "options": options,
    }


def answer_file(
    source: Path,
    output: Path,
    begin: Callable[[], Scheduler],
    folder: Path,
    manifest: Manifest,
    text: Text | None,
    defaults: RowDefaults,
    *,
    options: dict[str, Any],
    heard: Callable[[BatchRun, InputFile], object],
) -> FileAnswers:
    """Answer every row of `source` into `output`, or those that an earlier run has left. `begin` is called when
    nothing speaks against that.

    `options`: what of `defaults` and beside them tells this run from another, as JSON has it. `heard` is called after
    every step. Raises UsageError, GenerationError, InstallationError; ResourceError when the disk is full,
    ProviderError when the model cannot go on: the answers so far stay, and the same call goes on.
    """
    looked, place = look_at(source), output.absolute()  # whoever hears of steps may go to another folder
    if looked.rows:
        check_defaults(defaults, text, looked.format)
    run_of = identity(looked, contents_hash(folder, manifest), options)
    with Journal(journal_path(output), run_of, defaults.base_seed, looked.rows) as journal:
        finished = is_finished(output, place, journal)  # the run that had the journal may have ended just now
        began = time.perf_counter()
        run = BatchRun(begin(), text, replace(defaults, base_seed=journal.seed), journal, lambda at: heard(at, looked))
        run.go(rows_of(looked, journal.path))
        journal.sync()
        check_unchanged(looked, journal.path)
        if not finished:
            write_answers(place, journal.answers())
        journal.remove()
        return FileAnswers(
            output,
            len(journal),
            journal.errors,
            journal.resumed,
            run.prompt_tokens,
            run.tokens,
            time.perf_counter() - began,
            told_unread(run.unread),
            journal.seed,
        )
