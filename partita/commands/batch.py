"""`partita generate --input FILE --output FILE`: rows answered here or on a Ray cluster, and a line at the end."""

from __future__ import annotations

import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from partita.commands.generate_options import GenerateOptions
from partita.commands.generation import check_placement, open_batch, open_for_prompts, print_notes, write_report
from partita.commands.outputs import Sink
from partita.commands.results import BatchResult, ClusterResult
from partita.commands.terminal import Bars, note, print_record
from partita.errors import INTERRUPTED, PartitaError, ResourceError, UsageError
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
from partita.options.fields import group
from partita.options.generation import BatchOptions, SamplingValues
from partita.options.groups import ProviderChain
from partita.package.folder import Manifest
from partita.runtime.chain.pins import parse_pins
from partita.runtime.generate.prefix_file import read_content
from partita.runtime.generate.text.tokens import stop_token_ids


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


def run_batch(
    options: GenerateOptions, given: Sampling, target: Target, manifest: Manifest, sink: Sink | None, source: Path
) -> int:
    """Load the package, answer every row of `source`, write the report to `sink`; returns the exit code. `given`: the
    sampling options as given.
    """
    parse_pins(target.pins, target.chain)  # refused before anything is opened
    check_placement(options, target)
    prompts, defaults = scan_file(source), _defaults(options)
    error: PartitaError | None = None
    interrupted, result = False, None
    with open_for_prompts(options, target, manifest, observe=options.report is not None) as model, RowBar() as bar:
        text = model.tokenizer
        if prompts.rows:
            check_defaults(defaults, text, prompts.format)
        engine = open_batch(options, model)
        notes = chunk_ignored(options.prefill_chunk, engine.chunk)
        print_notes(target, model, notes)
        answer = partial(run_rows, engine=engine, text=text, vocab_size=manifest.graph.vocab_size)
        try:
            result = _run_file(options, given, manifest, prompts, answer, defaults, bar)
        except KeyboardInterrupt:
            interrupted = True
        except PartitaError as raised:
            error = raised
        _print_end(options, result, bar)
        request = ReportRequest(
            finish_reason="error" if error else "interrupted" if interrupted else "stop",
            finish_detail=str(error) if error else "",
            complete=result is not None,
            tokenizer_load_seconds=model.text_seconds,
            notes=notes + target.notes,
            options=sampling_options([options.sampling]),
            limits=options.limits,
            probe_seconds=options.probe_seconds,
        )
        try:
            if result is not None and options.as_json:
                print_record(
                    BatchResult.copy_of(
                        result,
                        package=str(options.package),
                        chain=model.chain,
                        chain_source=target.source,
                        options=SamplingValues(**{**options.sampling.figures(), "seed": result.seed}),
                        adapter=options.adapter,
                        threads=options.threads,
                        load_seconds=model.load_seconds,
                        slots=engine.slots,
                        input=str(options.input),
                        notes=request.notes,
                    )
                )
        finally:  # stdout may be full or closed
            if sink is not None and (bar.last is None or not bar.last.tokens):
                note("no rows were processed, so there is no report")
            elif sink is not None:
                interrupted = write_report(sink, engine, request) or interrupted
    if error is not None:
        raise error
    return INTERRUPTED if interrupted else 0


def check_cluster_options(options: GenerateOptions) -> None:
    """Raise UsageError for options that a cluster does not support, InstallationError without Ray."""
    from partita.library.batches.cluster import import_ray

    if options.input is None:
        raise UsageError("--address is for prompt files; give --input and --output")
    if not re.fullmatch(r"auto|local|\S+:\d+", options.address or ""):
        raise UsageError(f"--address {options.address}: use auto, local or HOST:PORT, as printed by `ray start`")
    if options.prefix or options.report or options.limits.as_dict():
        raise UsageError("--address cannot be combined with --prefix, --report or placement limits; omit them")
    import_ray()


def run_on_cluster(options: GenerateOptions, given: Sampling, manifest: Manifest, source: Path) -> int:
    """Have workers answer every row of `source`; returns the exit code. `given`: the sampling options as given."""
    from partita.library.batches.cluster import Setup, answer_on_cluster, contents_of

    assert options.address is not None
    prompts = scan_file(source)
    setup = Setup(
        options.package,
        contents_of(options.package, manifest),
        group(options, ProviderChain),
        options.choice,
        group(options, BatchOptions),
        graph_capture=options.graph_capture,
        token_ids=options.token_ids,
        format=prompts.format,
    )
    answer = partial(
        answer_on_cluster,
        address=options.address,
        setup=setup,
        slots=manifest.graph.batch_size,
        count=prompts.rows,
        workers=options.workers,
    )
    result = None
    with RowBar() as bar:
        try:
            result = _run_file(options, given, manifest, prompts, answer, _defaults(options), bar)
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            _print_end(options, result, bar)
    if options.as_json:
        places = {"package": str(options.package), "address": options.address, "input": str(options.input)}
        print_record(ClusterResult.copy_of(result, **places))
    return 0


def _run_file(
    options: GenerateOptions,
    given: Sampling,
    manifest: Manifest,
    prompts: InputFile,
    answer: Callable[[Iterator[InputRow], RowDefaults], Iterator[AnswerRow]],
    defaults: RowDefaults,
    bar: RowBar,
) -> BatchRunResult:
    """Answer the rows of a file by `answer`; see `run_file`."""
    assert options.output is not None
    return run_file(
        prompts,
        options.output,
        answer,
        defaults,
        package=contents_hash(options.package, manifest),
        options={"seed": given.seed, "adapter": options.adapter, "token_ids": options.token_ids},
        on_progress=bar.show,
        on_note=note,
    )


def _defaults(options: GenerateOptions) -> RowDefaults:
    """Options of rows that do not set their own."""
    seed = options.sampling.seed
    return RowDefaults(
        sampling=options.sampling,
        base_seed=secrets.randbits(SEED_BITS) if seed is None else seed,
        stop=options.stop,
        stop_ids=tuple(sorted(stop_token_ids(options.package))),
        chat=options.is_chat,
        system=options.system,
        prefix=None if options.prefix is None else read_content(options.prefix),
    )


def _print_end(options: GenerateOptions, result: BatchRunResult | None, bar: RowBar) -> None:
    """Print a line on stderr: the speed, or the completed rows of an interrupted run."""
    if result is None:
        if bar.last is not None and bar.last.done and options.output is not None:
            note(interrupted_text(options.output, bar.last.done, bar.last.rows))
        return
    parts = [plural(result.rows - result.resumed, "row")]
    if result.rows_per_second is not None and result.tokens_per_second is not None:
        speed = f"{result.rows_per_second:.1f} rows/s, {result.tokens_per_second:.1f} tokens/s"
        parts = [f"{parts[0]} and {plural(result.new_tokens, 'new token')} in {result.seconds:.1f} s: {speed}"]
    if result.resumed:
        parts.append(f"{plural(result.resumed, 'row')} already answered by an earlier run")
    if result.errors:
        parts.append(f"{plural(result.errors, 'row')} with an error instead of a completion")
    note("; ".join([*parts, f"answers: {result.output}"]))


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
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="partita-rows-"))
            file = Path(folder) / "stdin.jsonl"
            with file.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
        except OSError as error:
            raise ResourceError(
                f"--input -: cannot store the rows ({error.strerror}); set TMPDIR to a folder with free "
                "space, or put the rows into a file"
            ) from error
        yield file
