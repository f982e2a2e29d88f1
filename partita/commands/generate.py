"""`partita generate`: checks the options, then generates, runs a prompt file or saves a prefix; `run` and `cache`.

Text goes to stdout token by token, timings to stderr. Ctrl-C becomes a finish reason and an exit code, and every way a
run can end still writes its report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from partita.check.requirements import Limits, check_limits
from partita.commands.arguments import (
    STDOUT,
    Sink,
    package_of,
    parse_ids,
    print_written,
    read_prompts,
    refuse_two_on_stdout,
    reserve_output,
)
from partita.commands.results import GeneratedRow, GenerateResult, GenerationTimings, fact_of
from partita.commands.terminal import (
    TERMINAL,
    note,
    print_note,
    print_record,
    print_target_notes,
    write_stderr,
    write_stdout,
)
from partita.errors import INTERRUPTED, GenerationError, PartitaError, UsageError
from partita.files import Output, reserve
from partita.foreign.folder import Choice, open_folder
from partita.library import model_cache
from partita.library.chain import Target, read_chain
from partita.library.engine.base import Engine, ReportRequest
from partita.library.engine.requests import check_speculation
from partita.library.generation import Generation
from partita.library.loading import open_engine
from partita.library.model import Model
from partita.library.notes import chunk_ignored, opened_notes
from partita.library.run_report import limits_error
from partita.library.sampling import Sampling, complete_sampling_for
from partita.observations.text_format import human_bytes, listing, percent, plural
from partita.options.fields import describe_fields, group, input_paths, path_of
from partita.options.generation import (
    BatchOptions,
    CacheListCommand,
    CacheRemoveCommand,
    ChatCommand,
    GenerateCommand,
    RunCommand,
    RunOptions,
    SamplingValues,
    SpeculationOptions,
)
from partita.options.groups import PlacementLimits
from partita.options.placement import PlaceOptions
from partita.package.folder import Manifest
from partita.partition_reports import storage
from partita.partition_reports.outcome import FEW_STEPS, TOO_FEW
from partita.runtime.generate.checks import check_adapter
from partita.runtime.generate.prefix_file import read_content, system_of
from partita.runtime.generate.text.chat_templates import conversation, has_template
from partita.runtime.generate.text.tokens import load_text

LIMIT_RUNS = 2
"""Runs per phase for measuring the copies of a step."""


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
    package = package_of(options.package, options)
    manifest = open_folder(package, Choice.of(options))
    check_adapter(package, manifest, options.adapter)
    check_speculation(package, manifest, options)
    requested = options.sampling
    sampling, notes = complete_sampling_for(requested, package, hints=True, of_rows=options.input is not None)
    options = replace(options, package=package, revision=None, **sampling.figures())
    target = replace(target, notes=(*target.notes, *notes))
    reads, written = input_paths(options), list[Path]()
    source, output, saved = path_of(options.input), path_of(options.output), path_of(options.save_prefix)
    if source is not None and output is not None:
        from partita.library.batches.batch_run import check_files
        from partita.library.batches.journal import journal_path

        reserve_output(output, "answers", reads, option="--output")
        check_files(source, output)
        written += (output, journal_path(output))
    if saved is not None:
        reserve(saved, "prefix", reads, option="--save-prefix")
    sink = None
    if options.report is not None:
        refuse_two_on_stdout(Path(options.report), as_json=options.as_json)
        sink = reserve_output(Path(options.report), "report", (*reads, *written), option="--report")
    if source is not None and output is not None:
        from partita.commands.batch import run_batch

        return run_batch(options, requested, target, manifest, sink)
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
    given = [each.flag for each in every if each.name in unused and getattr(options, each.name) != each.field.default]
    if given:
        raise UsageError(f"--save-prefix generates nothing; omit {listing(given)}")
    if len(options.prompts) != (options.system is None):
        raise UsageError("--save-prefix stores one text; give one prompt, or --system and no prompt")


def run_generation(
    options: GenerateCommand, target: Target, prompts: Sequence[str], manifest: Manifest, sink: Sink | None
) -> int:
    """Load, generate, write the report to `sink`; returns the exit code."""
    check_placement(options, target)
    with open_model(options, target, manifest, observe=sink is not None) as model:
        generation = _begin(options, model, prompts)  # before the notes: an error is one line
        notes = chunk_ignored(options.prefill_chunk, generation.chunk)
        print_notes(target, model, notes)
        if len(prompts) > 1 and not options.token_ids and not any(" " in prompt for prompt in prompts):
            print_note(f"{plural(len(prompts), 'prompt')}; for one prompt, put it in quotes")
        cut_short, closed = False, ""
        try:
            if not _print_steps(options, generation):
                closed = "stdout was closed"
            if options.as_json:
                print_record(_record(options, generation, model, target, notes))
            _print_timings(model, generation)
        finally:  # stdout may be full
            if sink is not None:
                request = model.report_request(generation.progress, options.probe_seconds)
                prefix = {} if options.prefix is None else {"prefix": str(options.prefix)}
                request = replace(
                    request,
                    finish_detail=request.finish_detail or closed,
                    notes=(*notes, *target.notes),
                    options={**request.options, **prefix},
                    limits=Limits.of(options),
                )
                cut_short = write_report(sink, model.engine, request, failed=generation.error is not None)
    if isinstance(generation.error, PartitaError):
        raise generation.error
    return INTERRUPTED if generation.error is not None or cut_short else 0


def open_model(options: RunOptions, target: Target, manifest: Manifest, *, observe: bool = True) -> Model:
    """Load the tokenizer, unless prompts are token ids, and the package. Raises the errors of both."""
    began, text, folder = time.perf_counter(), None, Path(options.package)
    with_text = not getattr(options, "token_ids", False)
    if with_text:
        takes_ids = isinstance(options, GenerateCommand) and not (options.is_chat or options.stop)
        text = load_text(folder, manifest.tokenizer, manifest.graph.max_length, takes_ids=takes_ids)
    seconds = time.perf_counter() - began
    engine = open_engine(
        folder,
        manifest,
        target,
        Choice.of(options),
        observe=observe,
        refusal_seconds=options.probe_seconds,
        audience=TERMINAL,
        with_text=with_text,
    )
    return Model(engine, text=text, with_text=with_text, text_seconds=seconds)


def open_batch(options: RunOptions, model: Model) -> Engine:
    """The engine of a model, open for requests. Raises UsageError, GenerationError."""
    return model.scheduler(**asdict(group(options, BatchOptions)))


def _begin(options: GenerateCommand, model: Model, prompts: Sequence[str]) -> Generation:
    """Queue the prompts. Raises GenerationError for invalid prompts."""
    begin: Callable[..., Generation]
    if options.is_chat:
        prefix = path_of(options.prefix)
        system = options.system if prefix is None else system_of(read_content(prefix))
        begin = partial(model.chat, [conversation(prompt, system) for prompt in prompts])
    else:
        begin = partial(model.generate, [parse_ids(prompt) for prompt in prompts] if options.token_ids else prompts)
    return begin(sampling=options.sampling, stop=options.stop, **asdict(group(options, BatchOptions)))


def print_notes(target: Target, model: Model, notes: Sequence[str] = ()) -> None:
    """Notes for the user before the first token."""
    print_target_notes(target)
    for line in (*opened_notes(target, model.engine.opened, model.manifest), *notes):
        print_note(line)


def check_placement(options: GenerateCommand, target: Target) -> None:
    """Raise ProviderError before the first token if the placement exceeds the limits.

    Bytes are known only from runs, so the package is opened for this alone and run on tokens that mean nothing.
    """
    limits = Limits.of(options)
    if not limits.as_dict():
        return
    from partita.library.place.placement import place_model

    placing = PlaceOptions(
        options.package,
        threads=options.threads,
        runs=LIMIT_RUNS,
        probe_seconds=0.0,
        **asdict(limits),
        **asdict(Choice.of(options)),
    )
    report, error = place_model(placing, target, audience=TERMINAL)
    if error := error or limits_error(report):
        raise error


def _ids(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def _print_steps(options: GenerateCommand, generation: Generation) -> bool:
    """Run the steps until they end or stdout is closed; return whether it is open. What ends it is `generation.error`.

    The text of a single row is printed token by token, and on stderr if stdout is for the report.
    """
    write = write_stderr if options.report == STDOUT else write_stdout
    live = len(generation.progress.tickets) == 1 and not options.as_json
    shown, is_open = 0, True
    with suppress(KeyboardInterrupt, PartitaError):
        for step in generation:
            piece = _ids(step.tokens[0]) if options.token_ids else step.text
            if live and piece:
                shown += len(step.text)
                is_open = write(piece)
            if not is_open:
                break
    try:
        generation.close()
    except PartitaError as error:
        generation.error = generation.error or error
    if options.as_json or not is_open:
        return is_open
    if live:
        return write(generation.text[shown:] + "\n")  # a row that was cut off may have held text back
    answers = generation.results
    texts = [_ids(answer.tokens) if options.token_ids else answer.text for answer in answers]
    return write("".join(f"[{number}] {text}\n" for number, text in enumerate(texts, start=1)))


def run_fields(options: GenerateCommand, model: Model, target: Target, notes: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `RunResult`."""
    return {
        "package": str(options.package),
        "chain": model.chain,
        "chain_source": target.source,
        "options": SamplingValues(**options.sampling.figures()),
        "adapter": options.adapter,
        "threads": options.threads,
        "load_seconds": model.load_seconds,
        "notes": notes + target.notes,
    }


def _record(
    options: GenerateCommand, generation: Generation, model: Model, target: Target, notes: tuple[str, ...]
) -> GenerateResult:
    """The generation for `--json`."""
    error, results = generation.error, generation.results
    return GenerateResult(
        **run_fields(options, model, target, notes),
        prefill_chunk_tokens=generation.chunk,
        tokenizer_load_seconds=model.text_seconds,
        rows=tuple(GeneratedRow.copy_of(row, text=None if options.token_ids else row.text) for row in results),
        timings=GenerationTimings(**generation.timings),
        speculation=generation.speculation,
        error=fact_of(error) if isinstance(error, PartitaError) else None,
    )


def _print_timings(model: Model, generation: Generation) -> None:
    """Print a line on stderr."""
    figures = generation.timings
    parts = [f"load {model.load_seconds:.2f} s"]
    if speed := figures["prefill_tokens_per_second"]:
        parts.append(f"prompt {plural(figures['prompt_tokens'], 'token')} at {speed:.0f} tokens/s")
    if seconds := figures["first_token_seconds"]:
        parts.append(f"first token after {seconds * 1e3:.0f} ms")
    if speed := figures["decode_tokens_per_second"]:
        few = f" ({TOO_FEW})" if figures["decode_steps"] < FEW_STEPS else ""
        parts.append(f"{figures['decode_tokens']} more at {speed:.1f} tokens/s{few}")
    drafts = generation.speculation
    if drafts is not None and drafts.acceptance_rate is not None:
        gain = "" if drafts.speedup is None else f", {drafts.speedup:.2f} times the speed without speculative decoding"
        parts.append(f"{percent(drafts.acceptance_rate)} of {drafts.drafted} draft tokens accepted{gain}")
    reasons = sorted({answer.finish_reason or "unfinished" for answer in generation.results})
    note("; ".join([*parts, f"finish: {', '.join(reasons)}"]))


def write_report(sink: Sink, engine: Engine, request: ReportRequest, *, failed: bool = False) -> bool:
    """Write the report; whether Ctrl-C ended the experiments for it. `failed`: the run was ended, perhaps too early for
    a report.
    """
    try:
        report = engine.report(request)
    except PartitaError:
        if not failed:
            raise
        return False
    sink.write(storage.to_json(report))
    if isinstance(sink, Output):
        print_written("report", sink.path)
    return bool(report.interruptions)


def save_prefix(options: GenerateCommand, target: Target, prompts: Sequence[str], manifest: Manifest) -> int:
    """Read the prompt or the system message, and save the prefix; returns the exit code."""
    assert options.save_prefix is not None
    given = None if options.system is not None else parse_ids(prompts[0]) if options.token_ids else prompts[0]
    if given == "":
        raise GenerationError("the prompt is empty; give some text to save")
    with open_model(options, target, manifest, observe=False) as model:
        print_notes(target, model)
        saved = model.save_prefix(
            options.save_prefix,
            given,
            system=options.system,
            prefill_chunk=options.prefill_chunk,
            adapter=options.adapter,
        )
    read = f"{plural(saved.tokens, 'token')}, prefilled in {saved.seconds:.2f} s; {human_bytes(saved.size_bytes)}"
    note(f"prefix: {options.save_prefix} ({read}; use it with --prefix)")
    return 0


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
