"""`partita generate`: checks the options, then generates, saves a prefix, or answers a prompt file; `run` and `cache`.

Rows of a prompt file are answered here or on a Ray cluster.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from partita.check.requirements import Limits, check_limits
from partita.commands.arguments import Sink, package_of, parse_ids, read_prompts, reserve_output, reserve_report
from partita.commands.generation import (
    check_placement,
    open_batch,
    open_model,
    prepare_run,
    print_notes,
    run_fields,
    run_generation,
    save_prefix,
    write_report,
)
from partita.commands.results import BatchResult, ClusterResult
from partita.commands.terminal import Bars, note, print_record, write_stdout
from partita.errors import INTERRUPTED, PartitaError, UsageError
from partita.files import reserve
from partita.library import model_cache
from partita.library.batches.batch_run import PIPE, Answer, BatchRunResult, Progress, check_files, run_file, run_rows
from partita.library.batches.journal import contents_hash, interrupted_text, journal_path
from partita.library.batches.prompt_files import scan_file
from partita.library.batches.rows import RowDefaults, check_defaults
from partita.library.chain import Target, read_chain
from partita.library.engine.base import ReportRequest
from partita.library.generation import sampling_options
from partita.library.model import chunk_ignored
from partita.library.sampling import SEED_BITS
from partita.observations.text_format import human_bytes, listing, plural
from partita.options.fields import describe_fields, input_paths, path_of
from partita.options.generation import (
    CacheListCommand,
    CacheRemoveCommand,
    ChatCommand,
    GenerateCommand,
    RunCommand,
    RunOptions,
    Sampling,
    SpeculationOptions,
)
from partita.options.groups import PlacementLimits
from partita.package.folder import Manifest
from partita.runtime.generate.prefix_file import read_content
from partita.runtime.generate.text.chat_templates import has_template
from partita.runtime.generate.text.tokens import stop_token_ids


def run(given: GenerateCommand) -> int:
    """Check the options, then generate; returns the exit code."""
    options = replace(given, prompts=(*given.prompts, *given.more_prompts), more_prompts=())
    _check_options(options)
    target = read_chain(options, graph_capture=options.graph_capture)
    check_limits(Limits.of(options), target.requested_names)
    without = options.input is not None or (options.save_prefix is not None and options.system is not None)
    prompts = [] if without else read_prompts(options.prompts)
    if options.token_ids:
        for prompt in prompts:
            parse_ids(prompt)
    requested_seed = options.seed
    options, target, manifest = prepare_run(options, target, of_rows=options.input is not None)
    reads, written = input_paths(options), list[Path]()
    source, output, saved = path_of(options.input), path_of(options.output), path_of(options.save_prefix)
    if source is not None and output is not None:
        reserve_output(output, "answers", reads, option="--output")
        check_files(source, output)
        written += (output, journal_path(output))
    if saved is not None:
        reserve(saved, "prefix", reads, option="--save-prefix")
    sink = reserve_report(options, (*reads, *written))
    if source is not None and output is not None:
        return run_batch(options, requested_seed, target, manifest, sink)
    if saved is not None:
        return save_prefix(options, target, prompts, manifest)
    return run_generation(options, target, prompts, manifest, sink)


def _check_options(options: GenerateCommand) -> None:
    """Check the options of the generation loop. Raises UsageError, InstallationError without Ray."""
    if options.token_ids and (options.is_chat or options.stop):
        raise UsageError("--token-ids uses no tokenizer, so --chat, --system and --stop are not available; omit them")
    if options.token_ids and options.input is not None and Path(options.input).suffix == ".txt":
        raise UsageError("--token-ids: --input is a file of texts; give a .jsonl or .parquet file with `tokens`")
    if options.save_prefix is not None:
        _check_saving(options)
    if options.prefix is not None and options.system is not None:
        raise UsageError("--prefix already contains the system message; omit --system")
    if "" in options.stop:
        raise UsageError("--stop is empty; give the text that stops the generation")
    if (options.input is None) != (options.output is None):
        raise UsageError("--input and --output belong together: a file of prompts, and one for their completions")
    if options.input is not None and options.prompts:
        raise UsageError("prompts come from --input or from the command line; use one of them")
    if options.address is None and options.workers is not None:
        raise UsageError("--workers is only for a cluster; give its address with --address")
    if options.address is not None:
        from partita.library.batches.cluster import check_address

        if options.input is None:
            raise UsageError("--address is for prompt files; give --input and --output")
        if options.prefix or options.report or Limits.of(options).as_dict():
            raise UsageError("--address cannot be combined with --prefix, --report or placement limits; omit them")
        check_address(options.address)


def _check_saving(options: GenerateCommand) -> None:
    """Raise UsageError for options that do not apply to saving a prefix."""
    unused = {each.name for cls in (SpeculationOptions, Sampling, PlacementLimits) for each in describe_fields(cls)}
    unused |= {"prefix", "stop", "input", "report", "as_json"} | ({"chat"} if options.system is None else set())
    every = describe_fields(GenerateCommand)
    given = [each.flag for each in every if each.name in unused and getattr(options, each.name) != each.default]
    if given:
        raise UsageError(f"--save-prefix generates nothing; omit {listing(given)}")
    if len(options.prompts) != (options.system is None):
        raise UsageError("--save-prefix stores one text; give one prompt, or --system and no prompt")


def run_any(options: RunCommand) -> int:
    """`partita run`: generate, or chat without a prompt; returns the exit code."""
    if not options.prompts and (options.report or options.as_json or options.raw or options.token_ids):
        raise UsageError("--report, --json, --raw and --token-ids are only for a prompt; give a prompt or omit them")
    package = package_of(options.package, options)
    common = {each.name: getattr(options, each.name) for each in fields(RunOptions)}
    common |= {"package": package, "revision": None}
    if not options.prompts:
        from partita.commands import chat

        return chat.run(ChatCommand(**common))
    templated = not (options.raw or options.token_ids) and has_template(package)
    of_prompt = {name: getattr(options, name) for name in ("prompts", "token_ids", "report", "as_json")}
    return run(GenerateCommand(**common, **of_prompt, chat=templated))


def list_cached(options: CacheListCommand) -> None:
    """Print a line for each package of the cache."""
    found = list(model_cache.cached_packages())
    if not found:
        note("the cache has no packages")
    wide = max((len(each.name) for each in found), default=0)
    for each in found:
        size = human_bytes(each.size_bytes)
        write_stdout(f"{each.name:<{wide}}  {each.precision:<7}  {size:<8}  {each.source}\n")


def remove_cached(options: CacheRemoveCommand) -> None:
    """Remove a package from the cache."""
    gone = model_cache.remove_cached(options.name)
    note(f"removed {gone.path} ({human_bytes(gone.size_bytes)})")


# --- prompt files -----------------------------------------------------------------------------------------------------


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


def run_batch(options: GenerateCommand, seed: int | None, target: Target, manifest: Manifest, sink: Sink | None) -> int:
    """Answer every row of --input, write the report to `sink`; returns the exit code.

    `seed`: as given. Raises UsageError, GenerationError for an unreadable file, errors of the run, KeyboardInterrupt.
    """
    if options.address is None:
        check_placement(options, target)
    package, output, prefix = Path(options.package), Path(options.output or ""), path_of(options.prefix)
    defaults = RowDefaults(
        sampling=options.sampling,
        base_seed=secrets.randbits(SEED_BITS) if seed is None else seed,
        stop=tuple(options.stop),
        stop_ids=tuple(sorted(stop_token_ids(package))),
        chat=options.is_chat,
        system=options.system,
        prefix=None if prefix is None else read_content(prefix),
    )
    identity = {"seed": seed, "adapter": options.adapter, "token_ids": options.token_ids}
    contents = contents_hash(package, manifest)
    with rows_file(Path(options.input or "")) as rows:
        source = scan_file(rows)

        def follow(answer: Answer, bar: RowBar) -> BatchRunResult:
            """Answer the rows with a bar, and print a line at the end, also after SIGTERM."""
            try:
                with bar:
                    result = run_file(
                        source, output, answer, defaults, package=contents, options=identity, on_progress=bar.show
                    )
            except BaseException:
                if bar.last is not None and bar.last.done:
                    note(interrupted_text(output, bar.last.done, bar.last.rows))
                raise
            note(_summary(result))
            return result

        if options.address is None:
            return _run_here(options, target, manifest, sink, defaults, follow)
        from partita.library.batches.cluster import answer_on_cluster

        result = follow(partial(answer_on_cluster, options=options, manifest=manifest, count=source.rows), RowBar())
        if options.as_json:
            paths = {"package": str(package), "input": str(options.input)}
            print_record(ClusterResult.copy_of(result, address=options.address, **paths))
        return 0


def _run_here(
    options: GenerateCommand,
    target: Target,
    manifest: Manifest,
    sink: Sink | None,
    defaults: RowDefaults,
    follow: Callable[[Answer, RowBar], BatchRunResult],
) -> int:
    """Load the package and answer the rows. An error of the run is raised after its report is written."""
    error: PartitaError | KeyboardInterrupt | None = None
    stopped = False
    with open_model(options, target, manifest, observe=sink is not None) as model:
        text, bar = model.tokenizer, RowBar()
        check_defaults(defaults, text)
        engine = open_batch(options, model)
        notes = chunk_ignored(options.prefill_chunk, engine.chunk)
        print_notes(target, model, notes)
        try:
            result = follow(partial(run_rows, engine=engine, text=text, vocab_size=manifest.graph.vocab_size), bar)
        except (PartitaError, KeyboardInterrupt) as found:
            error = found
        if sink is not None and (bar.last is None or not bar.last.tokens):
            note("no rows were processed, so there is no report")
        elif sink is not None:
            request = ReportRequest(
                finish_reason="stop"
                if error is None
                else "error"
                if isinstance(error, PartitaError)
                else "interrupted",
                finish_detail=str(error or ""),
                complete=error is None,
                tokenizer_load_seconds=model.text_seconds,
                notes=notes + target.notes,
                options=sampling_options([options.sampling]),
                limits=Limits.of(options),
                probe_seconds=options.probe_seconds,
            )
            stopped = write_report(sink, engine, request)
        if error is not None:
            raise error
        if options.as_json:
            figures = run_fields(replace(options, seed=result.seed), model, target, notes)
            print_record(BatchResult.copy_of(result, **figures, slots=engine.slots, input=str(options.input)))
    return INTERRUPTED if stopped else 0


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
