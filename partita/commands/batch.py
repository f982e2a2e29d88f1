"""`partita generate --input FILE --output FILE`: a bar while rows are answered, one line at the end, and a report."""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from partita.commands.audience import TERMINAL, say
from partita.commands.generate_options import GenerateOptions
from partita.commands.generation import check_placement, say_notes, write_report
from partita.commands.outputs import Sink
from partita.commands.results import BatchResult, ChainLink, SamplingOptions
from partita.commands.terminal import fold, note, print_record, stderr
from partita.errors import INTERRUPTED, PartitaError
from partita.library.batches.filing import FileAnswers, answer_file
from partita.library.batches.journal import journal_path, kept_words, progress_words
from partita.library.batches.reading import InputFile
from partita.library.batches.rows import RowDefaults
from partita.library.batches.running import BatchRun
from partita.library.chain import Target
from partita.library.cluster.running import ClusterRun
from partita.library.engine import ReportRequest
from partita.library.generation import told_options
from partita.library.local import LocalEngine
from partita.library.notes import chunk_ignored
from partita.library.sampling import SEED_BITS, Sampling
from partita.library.scheduler import Scheduler
from partita.observations.text_format import listing, plural
from partita.package import Manifest
from partita.runtime.pins import parse_pins
from partita.runtime.prefix_file import read_said
from partita.runtime.text import load_text, stop_token_ids

REFRESH_SECONDS = 0.2


class RowBar:
    """Rows done, and how fast, on stderr; silent when stderr is no terminal."""

    def __init__(self) -> None:
        self._bars = Progress(
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
        self.last: tuple[BatchRun | ClusterRun, InputFile] | None = None
        """How far the run is."""

    def __enter__(self) -> RowBar:
        self._bars.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._bars.stop()

    def hear(self, run: BatchRun | ClusterRun, source: InputFile) -> None:
        """A step was made."""
        self.last = run, source
        now = time.perf_counter()
        if self._bars.disable or now - self._shown < REFRESH_SECONDS:
            return
        self._shown, done, seconds = now, len(run.journal), now - self._began
        rate = (done - run.journal.resumed) / seconds
        speed = f"{rate:.1f} rows/s, {run.tokens / seconds:.0f} tokens/s"
        words = progress_words(done, source.rows)
        self._bars.update(self._task, completed=done, total=source.rows, description=words, speed=speed)


def run_batch(
    options: GenerateOptions, asked: Sampling, target: Target, manifest: Manifest, sink: Sink | None, source: Path
) -> int:
    """Load, answer every row of `source`, write the report to `sink`; returns the exit code. `asked`: the sampling
    before it was completed.
    """
    assert options.output is not None
    parse_pins(target.pins, target.chain)  # what makes no sense is said before anything is opened
    check_placement(options, target)
    began = time.perf_counter()
    may_be_ids = not (options.chat or options.stop)
    text = (
        None
        if options.token_ids
        else load_text(options.package, manifest.tokenizer, manifest.graph.max_length, takes_ids=may_be_ids)
    )
    tokenizer_seconds = time.perf_counter() - began
    defaults = replace(defaults_of(options), prefix=None if options.prefix is None else read_said(options.prefix))
    error: PartitaError | None = None
    interrupted, cut_short, filed = False, False, None
    with (
        LocalEngine(
            options.package,
            manifest,
            target,
            threads=options.where.threads,
            observe=options.report is not None,
            refusal_seconds=options.probe_seconds,
            audience=TERMINAL,
            choice=options.choice,
        ) as engine,
        RowBar() as bar,
    ):
        scheduler = Scheduler(
            engine,
            text,
            prefill_chunk=options.prefill_chunk,
            adapter=options.adapter,
            speculation=options.speculation,
            prefix=None if options.prefix is None else str(options.prefix),
        )
        notes = chunk_ignored(options.prefill_chunk, scheduler.begun)
        say_notes(options, engine, notes=notes)
        try:
            filed = answer_file(
                source,
                options.output,
                lambda: scheduler,
                options.package,
                manifest,
                text,
                defaults,
                options={**identity_of(options, asked), **_goes_on(defaults)},
                heard=bar.hear,
            )
        except KeyboardInterrupt:
            interrupted = True
        except PartitaError as raised:
            error = raised
        _say_end(options, engine, filed, bar)
        try:
            if filed is not None and options.as_json:
                print_record(_as_record(options, engine, scheduler, filed, notes))
        finally:  # stdout may be full or closed
            if sink is not None and not engine.runner.steps:
                say("nothing was run, so there is no report")
            elif sink is not None:
                reason = "error" if error else "interrupted" if interrupted else "stop"
                cut_short = write_report(
                    sink,
                    engine,
                    ReportRequest(
                        finish_reason=reason,
                        finish_detail=str(error) if error else "",
                        complete=filed is not None,
                        tokenizer_load_seconds=tokenizer_seconds,
                        notes=notes + target.notes,
                        options=told_options([options.sampling]),
                        limits=options.limits,
                        probe_seconds=options.probe_seconds,
                    ),
                )
    if error is not None:
        raise error
    return INTERRUPTED if interrupted or cut_short else 0


def defaults_of(options: GenerateOptions) -> RowDefaults:
    """What rows get that do not say otherwise."""
    seed = options.sampling.seed
    return RowDefaults(
        sampling=options.sampling,
        base_seed=secrets.randbits(SEED_BITS) if seed is None else seed,
        stop=options.stop,
        stop_ids=tuple(sorted(stop_token_ids(options.package))),
        chat=options.chat,
        system=options.system,
    )


def identity_of(options: GenerateOptions, asked: Sampling) -> dict[str, Any]:
    """The options that make a difference to an answer. A seed that was drawn is the run's own, and in its journal."""
    figures = {**options.sampling.figures(), "seed": asked.seed}
    others = {"stop": options.stop, "chat": options.chat, "system": options.system, "adapter": options.adapter}
    return {**figures, **others, "token_ids": options.token_ids}


def _goes_on(defaults: RowDefaults) -> dict[str, Any]:
    """What every row goes on with, which makes a difference to an answer, by a hash of it; nothing where that is
    nothing.
    """
    if defaults.prefix is None:
        return {}
    return {"prefix": hashlib.sha256(json.dumps(asdict(defaults.prefix)).encode()).hexdigest()[:16]}


def _say_end(options: GenerateOptions, engine: LocalEngine, filed: FileAnswers | None, bar: RowBar) -> None:
    """One line on stderr, and notes on the rows."""
    if bar.last is not None and (damage := bar.last[0].journal.damage):
        note(damage)
    if filed is None:
        if bar.last is not None and options.output is not None:
            run, source = bar.last
            note(kept_words(journal_path(options.output), len(run.journal), source.rows))
        return
    parts = [f"load {engine.opened.load_seconds:.2f} s", _speed(filed)]
    if filed.resumed:
        parts.append(f"{plural(filed.resumed, 'row')} were answered before")
    if filed.errors:
        parts.append(f"{plural(filed.errors, 'row')} with an error in place of an answer")
    note(fold("; ".join([*parts, f"answers: {filed.output}"]), sys.stderr, 2))
    if filed.unread:
        say(f"these fields of the rows were not read: {listing(filed.unread)}")


def _speed(filed: FileAnswers) -> str:
    done = plural(filed.rows - filed.resumed, "row")
    if filed.rows_per_second is None or filed.tokens_per_second is None:
        return done
    speed = f"{filed.rows_per_second:.1f} rows/s, {filed.tokens_per_second:.1f} tokens/s"
    return f"{done} and {plural(filed.new_tokens, 'new token')} in {filed.seconds:.1f} s: {speed}"


def _as_record(
    options: GenerateOptions, engine: LocalEngine, scheduler: Scheduler, filed: FileAnswers, notes: tuple[str, ...]
) -> BatchResult:
    """What became of the rows, for `--json`."""
    return BatchResult(
        package=str(options.package),
        chain=tuple(
            ChainLink(provider=entry.provider, status=entry.status, reason=entry.reason)
            for entry in engine.opened.chain
        ),
        chain_source=engine.target.source,
        options=SamplingOptions(**{**options.sampling.figures(), "seed": filed.seed}),
        adapter=options.adapter,
        threads=options.where.threads,
        load_seconds=engine.opened.load_seconds,
        slots=scheduler.slots,
        input=str(_given(options.input)),
        output=str(filed.output),
        rows=filed.rows,
        errors=filed.errors,
        resumed=filed.resumed,
        prompt_tokens=filed.prompt_tokens,
        new_tokens=filed.new_tokens,
        seconds=filed.seconds,
        rows_per_second=filed.rows_per_second,
        tokens_per_second=filed.tokens_per_second,
        notes=notes + engine.target.notes,
    )


def _given(path: Path | None) -> Path:
    assert path is not None
    return path
