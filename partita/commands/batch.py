"""`partita generate --input FILE --output FILE`: a progress bar, one line at the end, and a report."""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from partita.commands.generate_options import GenerateOptions
from partita.commands.generation import check_placement, open_model, say_notes, write_report
from partita.commands.outputs import Sink
from partita.commands.results import BatchResult, SamplingOptions, chain_links
from partita.commands.terminal import fold, note, print_record, stderr
from partita.errors import INTERRUPTED, PartitaError
from partita.library.batches.journal import kept_words
from partita.library.batches.reading import look_at
from partita.library.batches.rows import RowDefaults, check_defaults
from partita.library.batches.running import FileAnswers, Progress, answer_file, answers
from partita.library.chain import Target
from partita.library.contents import contents_hash
from partita.library.engine import ReportRequest
from partita.library.generation import sampling_options
from partita.library.model import Model
from partita.library.notes import chunk_ignored
from partita.library.sampling import SEED_BITS, Sampling
from partita.observations.text_format import plural
from partita.package import Manifest
from partita.runtime.pins import parse_pins
from partita.runtime.prefix_file import read_said
from partita.runtime.text import stop_token_ids

REFRESH_SECONDS = 0.2


class RowBar:
    """Rows done, and how fast, on stderr; silent when stderr is no terminal."""

    def __init__(self) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=stderr,
            transient=True,
            disable=not stderr.is_terminal,
        )
        self._task = self._bars.add_task("rows", total=None, speed="")
        self._began, self._shown = time.perf_counter(), 0.0
        self.last: Progress | None = None
        """None until a row is about to be answered."""

    def __enter__(self) -> RowBar:
        self._bars.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._bars.stop()

    def show(self, progress: Progress) -> None:
        """Show how far a run is, a few times a second."""
        self.last = progress
        now = time.perf_counter()
        if self._bars.disable or now - self._shown < REFRESH_SECONDS:
            return
        self._shown, seconds = now, now - self._began
        rate = (progress.done - progress.resumed) / seconds
        speed = f"{rate:.1f} rows/s, {progress.tokens / seconds:.0f} tokens/s"
        words = f"{progress.done:,} of {plural(progress.rows, 'row')}"
        self._bars.update(self._task, completed=progress.done, total=progress.rows, description=words, speed=speed)


def run_batch(
    options: GenerateOptions, asked: Sampling, target: Target, manifest: Manifest, sink: Sink | None, source: Path
) -> int:
    """Load the package, answer every row of `source`, write the report to `sink`; returns the exit code. `asked`: the
    sampling options as given.
    """
    assert options.output is not None
    parse_pins(target.pins, target.chain)  # refused before anything is opened
    check_placement(options, target)
    looked = look_at(source)
    defaults = replace(defaults_of(options), prefix=None if options.prefix is None else read_said(options.prefix))
    error: PartitaError | None = None
    interrupted, cut_short, filed = False, False, None
    with open_model(options, target, manifest, observe=options.report is not None) as model, RowBar() as bar:
        text = model.tokenizer
        if looked.rows:
            check_defaults(defaults, text, looked.format)
        engine = model.scheduler(
            prefill_chunk=options.prefill_chunk,
            adapter=options.adapter,
            speculate=options.speculation.speculate,
            draft=options.speculation.draft,
            prefix=options.prefix,
        )
        notes = chunk_ignored(options.prefill_chunk, engine.chunk)
        say_notes(options, target, model, notes=notes)
        try:
            filed = answer_file(
                looked,
                options.output,
                lambda rows, given: answers(rows, given, engine, text, manifest.graph.vocab_size),
                defaults,
                package=contents_hash(options.package, manifest),
                options=identity_of(options, asked, defaults),
                heard=bar.show,
                noted=note,
            )
        except KeyboardInterrupt:
            interrupted = True
        except PartitaError as raised:
            error = raised
        say_end(options, filed, bar, load_seconds=model.load_seconds)
        try:
            if filed is not None and options.as_json:
                print_record(_as_record(options, target, model, filed, notes))
        finally:  # stdout may be full or closed
            if sink is not None and (bar.last is None or not bar.last.tokens):
                note("nothing was run, so there is no report")
            elif sink is not None:
                reason = "error" if error else "interrupted" if interrupted else "stop"
                cut_short = write_report(
                    sink,
                    engine,
                    ReportRequest(
                        finish_reason=reason,
                        finish_detail=str(error) if error else "",
                        complete=filed is not None,
                        tokenizer_load_seconds=model.text_seconds,
                        notes=notes + target.notes,
                        options=sampling_options([options.sampling]),
                        limits=options.limits,
                        probe_seconds=options.probe_seconds,
                    ),
                )
    if error is not None:
        raise error
    return INTERRUPTED if interrupted or cut_short else 0


def defaults_of(options: GenerateOptions) -> RowDefaults:
    """Options of rows that do not set their own."""
    seed = options.sampling.seed
    return RowDefaults(
        sampling=options.sampling,
        base_seed=secrets.randbits(SEED_BITS) if seed is None else seed,
        stop=options.stop,
        stop_ids=tuple(sorted(stop_token_ids(options.package))),
        chat=options.chat,
        system=options.system,
    )


def identity_of(options: GenerateOptions, asked: Sampling, defaults: RowDefaults) -> dict[str, Any]:
    """The options that change answers. A seed that was drawn is in the journal; a prefix is there as a hash."""
    figures = {**options.sampling.figures(), "seed": asked.seed}
    others = {"stop": options.stop, "chat": options.chat, "system": options.system, "adapter": options.adapter}
    identity = {**figures, **others, "token_ids": options.token_ids}
    if defaults.prefix is not None:
        identity["prefix"] = hashlib.sha256(json.dumps(asdict(defaults.prefix)).encode()).hexdigest()[:16]
    return identity


def say_end(
    options: GenerateOptions, filed: FileAnswers | None, bar: RowBar, *, load_seconds: float | None = None
) -> None:
    """One line on stderr: the speed, or how far a run came that ended early."""
    if filed is None:
        if bar.last is not None and bar.last.done and options.output is not None:
            note(kept_words(options.output, bar.last.done, bar.last.rows))
        return
    parts = [] if load_seconds is None else [f"load {load_seconds:.2f} s"]
    parts.append(_speed(filed))
    if filed.resumed:
        parts.append(f"{plural(filed.resumed, 'row')} were answered before")
    if filed.errors:
        parts.append(f"{plural(filed.errors, 'row')} with an error in place of an answer")
    note(fold("; ".join([*parts, f"answers: {filed.output}"]), sys.stderr, 2))


def _speed(filed: FileAnswers) -> str:
    done = plural(filed.rows - filed.resumed, "row")
    if filed.rows_per_second is None or filed.tokens_per_second is None:
        return done
    speed = f"{filed.rows_per_second:.1f} rows/s, {filed.tokens_per_second:.1f} tokens/s"
    return f"{done} and {plural(filed.new_tokens, 'new token')} in {filed.seconds:.1f} s: {speed}"


def _as_record(
    options: GenerateOptions, target: Target, model: Model, filed: FileAnswers, notes: tuple[str, ...]
) -> BatchResult:
    """The result of the run, for `--json`."""
    return BatchResult(
        package=str(options.package),
        chain=chain_links(model.chain),
        chain_source=target.source,
        options=SamplingOptions(**{**options.sampling.figures(), "seed": filed.seed}),
        adapter=options.adapter,
        threads=options.where.threads,
        load_seconds=model.load_seconds,
        slots=model.engine.slots,
        input=str(options.input),
        notes=notes + target.notes,
        **figures_of(filed),
    )


def figures_of(filed: FileAnswers) -> dict[str, Any]:
    """Fields of a result that say how many rows there are, and how fast they were answered."""
    return {
        "output": str(filed.output),
        "rows": filed.rows,
        "errors": filed.errors,
        "resumed": filed.resumed,
        "prompt_tokens": filed.prompt_tokens,
        "new_tokens": filed.new_tokens,
        "seconds": filed.seconds,
        "rows_per_second": filed.rows_per_second,
        "tokens_per_second": filed.tokens_per_second,
    }
