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
from typing import Any

from partita.check.requirements import Limits
from partita.commands.arguments import Sink
from partita.commands.generate import (
    check_placement,
    open_batch,
    open_model,
    print_notes,
    run_fields,
    write_report,
)
from partita.commands.results import BatchResult, ClusterResult
from partita.commands.terminal import Bars, note, print_record
from partita.errors import INTERRUPTED, PartitaError, UsageError
from partita.foreign.folder import Choice
from partita.library.batches.batch_run import PIPE, BatchRunResult, Progress, run_file, run_rows
from partita.library.batches.journal import contents_hash, interrupted_text
from partita.library.batches.prompt_files import InputFile, scan_file
from partita.library.batches.rows import AnswerRow, InputRow, RowDefaults, check_defaults
from partita.library.chain import Target
from partita.library.engine.base import ReportRequest
from partita.library.generation import sampling_options
from partita.library.notes import chunk_ignored
from partita.library.sampling import SEED_BITS, Sampling
from partita.observations.text_format import plural
from partita.options.fields import group, path_of
from partita.options.generation import BatchOptions, GenerateCommand
from partita.options.groups import ProviderChain
from partita.package.folder import Manifest
from partita.runtime.generate.prefix_file import read_content
from partita.runtime.generate.text.tokens import stop_token_ids

Answer = Callable[[Iterator[InputRow], RowDefaults], Iterator[AnswerRow]]
"""Answers rows; see `run_file`."""
Followed = tuple[BatchRunResult | None, PartitaError | KeyboardInterrupt | None, Progress | None]
"""The result of a run, or what ended it; and its last progress."""


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


def run_batch(options: GenerateCommand, given: Sampling, target: Target, manifest: Manifest, sink: Sink | None) -> int:
    """Answer every row of --input, write the report to `sink`; returns the exit code.

    `given`: the sampling options as given. Raises UsageError, GenerationError for an unreadable file.
    """
    if options.address is None:
        check_placement(options, target)
    package, output, prefix = Path(options.package), Path(options.output or ""), path_of(options.prefix)
    defaults = RowDefaults(
        sampling=options.sampling,
        base_seed=secrets.randbits(SEED_BITS) if given.seed is None else given.seed,
        stop=tuple(options.stop),
        stop_ids=tuple(sorted(stop_token_ids(package))),
        chat=options.is_chat,
        system=options.system,
        prefix=None if prefix is None else read_content(prefix),
    )
    identity = {"seed": given.seed, "adapter": options.adapter, "token_ids": options.token_ids}
    with rows_file(Path(options.input or "")) as rows:
        source = scan_file(rows)
        follow = partial(_follow, source, output, defaults, package=contents_hash(package, manifest), options=identity)
        if options.address is not None:
            return _run_on_cluster(options, options.address, manifest, source.rows, follow)
        return _run_here(options, target, manifest, sink, defaults, follow)


def _follow(source: InputFile, output: Path, defaults: RowDefaults, answer: Answer, **identity: Any) -> Followed:
    """Answer the rows with a bar, and print a line at the end."""
    with RowBar() as bar:
        try:
            result = run_file(source, output, answer, defaults, on_progress=bar.show, **identity)
        except (PartitaError, KeyboardInterrupt) as error:
            if bar.last is not None and bar.last.done:
                note(interrupted_text(output, bar.last.done, bar.last.rows))
            return None, error, bar.last
    note(_summary(result))
    return result, None, bar.last


def _run_here(
    options: GenerateCommand,
    target: Target,
    manifest: Manifest,
    sink: Sink | None,
    defaults: RowDefaults,
    follow: Callable[[Answer], Followed],
) -> int:
    """Load the package and answer the rows."""
    with open_model(options, target, manifest, observe=sink is not None) as model:
        text = model.tokenizer
        check_defaults(defaults, text)
        engine = open_batch(options, model)
        notes = chunk_ignored(options.prefill_chunk, engine.chunk)
        print_notes(target, model, notes)
        result, error, last = follow(partial(run_rows, engine=engine, text=text, vocab_size=manifest.graph.vocab_size))
        interrupted = isinstance(error, KeyboardInterrupt)
        if sink is not None and (last is None or not last.tokens):
            note("no rows were processed, so there is no report")
        elif sink is not None:
            request = ReportRequest(
                finish_reason="interrupted" if interrupted else "error" if error else "stop",
                finish_detail=str(error or ""),
                complete=error is None,
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
    if isinstance(error, PartitaError):
        raise error
    return INTERRUPTED if interrupted else 0


def _run_on_cluster(
    options: GenerateCommand, address: str, manifest: Manifest, count: int, follow: Callable[[Answer], Followed]
) -> int:
    """Have workers answer the rows."""
    from partita.library.batches.cluster import Setup, answer_on_cluster, contents_of

    package = Path(options.package)
    setup = Setup(
        package,
        contents_of(package, manifest),
        group(options, ProviderChain),
        Choice.of(options),
        group(options, BatchOptions),
        graph_capture=options.graph_capture,
        token_ids=options.token_ids,
    )
    slots, workers = manifest.graph.batch_size, options.workers
    answer = partial(answer_on_cluster, address=address, setup=setup, slots=slots, count=count, workers=workers)
    result, error, _ = follow(answer)
    if isinstance(error, PartitaError):
        raise error
    if result is not None and options.as_json:
        print_record(ClusterResult.copy_of(result, package=str(package), address=address, input=str(options.input)))
    return INTERRUPTED if error else 0


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
    with tempfile.TemporaryDirectory(prefix="partita-rows-") as folder:
        file = Path(folder) / "stdin.jsonl"
        with file.open("wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
        yield file
