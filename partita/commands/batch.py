"""`partita generate --input FILE --output FILE`: rows answered here or on a Ray cluster, and a line at the end."""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from partita.check.requirements import Limits
from partita.commands.generation import (
    check_placement,
    open_batch,
    open_for_prompts,
    print_notes,
    run_fields,
    write_report,
)
from partita.commands.outputs import Sink
from partita.commands.results import BatchResult, ClusterResult
from partita.commands.terminal import Bars, note, print_record
from partita.errors import INTERRUPTED, PartitaError, ResourceError, UsageError
from partita.library.batches.batch_run import PIPE, BatchRunResult, Progress, run_file, run_rows
from partita.library.batches.journal import contents_hash, interrupted_text
from partita.library.batches.prompt_files import scan_file
from partita.library.batches.rows import AnswerRow, InputRow, RowDefaults, check_defaults
from partita.library.chain import Target
from partita.library.engine.base import ReportRequest
from partita.library.generation import sampling_options
from partita.library.model import chunk_ignored
from partita.library.sampling import SEED_BITS, Sampling
from partita.observations.text_format import plural
from partita.options.fields import path_of
from partita.options.generation import GenerateCommand
from partita.package.folder import Manifest
from partita.runtime.generate.prefix_file import read_content
from partita.runtime.generate.text.tokens import stop_token_ids

Answer = Callable[[Iterator[InputRow], RowDefaults], Iterator[AnswerRow]]
"""Answers rows; see `run_file`."""


class RowBar(Bars):
    """Progress of a file: completed rows and speed."""

    def __init__(self) -> None:
        super().__init__()
        self._task = self.bars.add_task("rows", total=None, size="")
        self._began = time.perf_counter()
        self.last: Progress | None = None
        """None before the first row."""

    def show(self, progress: Progress) -> None:
        """Show the progress of a run."""
        self.last = progress
        seconds = time.perf_counter() - self._began
        rate = (progress.done - progress.resumed) / seconds
        speed = f"{rate:.1f} rows/s, {progress.tokens / seconds:.0f} tokens/s"
        words = f"{progress.done:,} of {plural(progress.rows, 'row')}"
        self.bars.update(self._task, completed=progress.done, total=progress.rows, description=words, size=speed)


class PromptFileRun:
    """The rows of a prompt file, their defaults, and how far they are."""

    def __init__(
        self, options: GenerateCommand, given: Sampling, manifest: Manifest, source: Path, output: Path
    ) -> None:
        """`given`: the sampling options as given. Raises UsageError, GenerationError for an unreadable file."""
        self.options, self.prompts, self.output = options, scan_file(source), output
        self._given, self._package = given, contents_hash(Path(options.package), manifest)
        prefix = path_of(options.prefix)
        self.defaults = RowDefaults(
            sampling=options.sampling,
            base_seed=secrets.randbits(SEED_BITS) if given.seed is None else given.seed,
            stop=tuple(options.stop),
            stop_ids=tuple(sorted(stop_token_ids(Path(options.package)))),
            chat=options.is_chat,
            system=options.system,
            prefix=None if prefix is None else read_content(prefix),
        )
        self.last: Progress | None = None
        """The last progress; None before the run."""

    def run(self, answer: Answer) -> BatchRunResult:
        """Answer the rows, and print a line at the end. Raises the errors of `run_file`, KeyboardInterrupt."""
        options = {"seed": self._given.seed, "adapter": self.options.adapter, "token_ids": self.options.token_ids}
        result = None
        with RowBar() as bar:
            try:
                result = run_file(
                    self.prompts,
                    self.output,
                    answer,
                    self.defaults,
                    package=self._package,
                    options=options,
                    on_progress=bar.show,
                )
            finally:
                self.last = bar.last
                if result is not None:
                    note(_summary(result))
                elif bar.last is not None and bar.last.done:
                    note(interrupted_text(self.output, bar.last.done, bar.last.rows))
        return result


def run_batch(
    options: GenerateCommand,
    given: Sampling,
    target: Target,
    manifest: Manifest,
    sink: Sink | None,
    source: Path,
    output: Path,
) -> int:
    """Answer every row of `source`, write the report to `sink`; returns the exit code. `given`: the sampling options as
    given."""
    if options.address is None:
        check_placement(options, target)
    with rows_file(source) as rows:
        file = PromptFileRun(options, given, manifest, rows, output)
        if options.address is not None:
            return _run_on_cluster(file, manifest)
        return _run_here(file, target, manifest, sink)


def _run_here(file: PromptFileRun, target: Target, manifest: Manifest, sink: Sink | None) -> int:
    """Load the package and answer the rows."""
    options, error, interrupted, result = file.options, None, False, None
    with open_for_prompts(options, target, manifest, observe=sink is not None) as model:
        text = model.tokenizer
        check_defaults(file.defaults, text)
        engine = open_batch(options, model)
        notes = chunk_ignored(options.prefill_chunk, engine.chunk)
        print_notes(target, model, notes)
        try:
            result = file.run(partial(run_rows, engine=engine, text=text, vocab_size=manifest.graph.vocab_size))
        except KeyboardInterrupt:
            interrupted = True
        except PartitaError as raised:
            error = raised
        if sink is not None and (file.last is None or not file.last.tokens):
            note("no rows were processed, so there is no report")
        elif sink is not None:
            request = ReportRequest(
                finish_reason="error" if error else "interrupted" if interrupted else "stop",
                finish_detail=str(error) if error else "",
                complete=result is not None,
                tokenizer_load_seconds=model.text_seconds,
                notes=notes + target.notes,
                options=sampling_options([options.sampling]),
                limits=Limits.of(options),
                probe_seconds=options.probe_seconds,
            )
            interrupted = write_report(sink, engine, request) or interrupted
        if result is not None and options.as_json:
            fields = run_fields(replace(options, seed=result.seed), model, target, notes)
            print_record(BatchResult.copy_of(result, **fields, slots=engine.slots, input=str(options.input)))
    if error is not None:
        raise error
    return INTERRUPTED if interrupted else 0


def _run_on_cluster(file: PromptFileRun, manifest: Manifest) -> int:
    """Have workers answer the rows."""
    from partita.library.batches.cluster import Setup, answer_on_cluster, contents_of

    options, package = file.options, Path(file.options.package)
    setup = Setup(options, contents_of(package, manifest))
    answer = partial(answer_on_cluster, setup=setup, slots=manifest.graph.batch_size, count=file.prompts.rows)
    try:
        result = file.run(answer)
    except KeyboardInterrupt:
        return INTERRUPTED
    if options.as_json:
        print_record(
            ClusterResult.copy_of(result, package=str(package), address=options.address, input=str(options.input))
        )
    return 0


def _summary(result: BatchRunResult) -> str:
    """The rows and speed of a run."""
    parts = [plural(result.rows - result.resumed, "row")]
    if result.rows_per_second is not None and result.tokens_per_second is not None:
        speed = f"{result.rows_per_second:.1f} rows/s, {result.tokens_per_second:.1f} tokens/s"
        parts = [f"{parts[0]} and {plural(result.new_tokens, 'new token')} in {result.seconds:.1f} s: {speed}"]
    if result.resumed:
        parts.append(f"{plural(result.resumed, 'row')} already answered by an earlier run")
    if result.errors:
        parts.append(f"{plural(result.errors, 'row')} with an error instead of a completion")
    return "; ".join([*parts, f"answers: {result.output}"])


@contextmanager
def rows_file(source: Path) -> Iterator[Path]:
    """The file with the rows of `source`, until the block ends. Raises UsageError, ResourceError."""
    if source != PIPE:
        yield source
        return
    if sys.stdin is None:
        raise UsageError("--input -: stdin is closed; give a file")
    if sys.stdin.isatty():
        note("note: reading rows from the terminal, a JSON object per line, until Ctrl-D on a line of its own")
    with tempfile.TemporaryDirectory(prefix="partita-rows-") as folder:
        file = Path(folder) / "stdin.jsonl"
        try:
            with file.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
        except OSError as error:
            raise ResourceError(
                f"--input -: cannot store the rows ({error.strerror}); set TMPDIR to a folder with free "
                "space, or put the rows into a file"
            ) from error
        yield file
