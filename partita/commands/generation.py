"""The run of `partita generate`: loads the package, prints text token by token, timings on stderr, writes the report.

Ctrl-C becomes a finish reason and an exit code, and every way a run can end still writes its report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from partita.check.requirements import Limits
from partita.commands.arguments import STDOUT, Sink, package_of, parse_ids, print_written
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
from partita.errors import INTERRUPTED, GenerationError, PartitaError
from partita.files import Output
from partita.foreign.folder import Choice, open_folder
from partita.library.chain import Target
from partita.library.engine.base import Engine, ReportRequest
from partita.library.engine.requests import check_speculation
from partita.library.generation import Generation
from partita.library.loading import open_engine, opened_notes
from partita.library.model import Model, chunk_ignored
from partita.library.run_report import limits_error
from partita.library.sampling import complete_sampling_for
from partita.observations.text_format import human_bytes, percent, plural
from partita.options.fields import group, path_of
from partita.options.generation import BatchOptions, GenerateCommand, RunOptions, SamplingValues
from partita.options.placement import PlaceOptions
from partita.package.folder import Manifest
from partita.partition_reports import storage
from partita.partition_reports.phase_records import FEW_STEPS, TOO_FEW
from partita.runtime.generate.checks import check_adapter
from partita.runtime.generate.prefix_file import read_content, system_of
from partita.runtime.generate.text.chat_templates import conversation
from partita.runtime.generate.text.tokens import load_text

Run = TypeVar("Run", bound=RunOptions)
LIMIT_RUNS = 2
"""Runs per phase for measuring the copies of a step."""


def prepare_run(
    given: Run, target: Target, *, of_rows: bool = False, whole_cache: bool = False
) -> tuple[Run, Target, Manifest]:
    """The options with the package of MODEL and a value of every sampling option, the chain with notes on them, and the
    manifest.

    `of_rows`: the options are defaults of rows. `whole_cache`: a completion may fill the cache by default.
    """
    package = package_of(given.package, given)
    manifest = open_folder(package, Choice.of(given))
    check_adapter(package, manifest, given.adapter)
    check_speculation(package, manifest, given)
    most = given.max_new_tokens or (manifest.graph.max_length if whole_cache else None)
    requested = replace(given.sampling, max_new_tokens=most)
    sampling, notes = complete_sampling_for(requested, package, hints=True, of_rows=of_rows)
    options = replace(given, package=package, revision=None, **sampling.figures())
    return options, replace(target, notes=(*target.notes, *notes)), manifest


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
    try:
        for step in generation:
            piece = _ids(step.tokens[0]) if options.token_ids else step.text
            if live and piece:
                shown += len(step.text)
                is_open = write(piece)
            if not is_open:
                break
    except (KeyboardInterrupt, PartitaError) as error:  # Ctrl-C may also interrupt the write
        generation.error = generation.error or error
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
