"""A generation as its user meets it: text out as it comes, timings on stderr, and a report if asked for.

What is generated and reported is the library's; here Ctrl-C becomes a finish reason and an exit code, and every way a
run can end still writes its report.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os.path import commonprefix

from partita.commands.audience import TERMINAL, say, say_chain
from partita.commands.generate_options import GenerateOptions, parse_ids
from partita.commands.outputs import STDOUT, Sink, say_written
from partita.commands.results import (
    ChainLink,
    GeneratedRow,
    GenerateResult,
    GenerationTimings,
    SamplingOptions,
    fact_of,
)
from partita.commands.terminal import fold, note, print_record, write_stderr, write_stdout
from partita.errors import INTERRUPTED, GenerationError, PartitaError
from partita.files import Output
from partita.library.chain import Target
from partita.library.engine import ReportRequest
from partita.library.generation import Generation, GenerationStep, begin, told_options
from partita.library.local import LocalEngine
from partita.library.notes import idle, inferred, unverified
from partita.library.prefixes import ids_after, prompt_after
from partita.library.run_report import limits_error
from partita.observations.text_format import percent, plural
from partita.options import PlaceOptions
from partita.package import Manifest
from partita.partition_reports import storage
from partita.partition_reports.outcome import FEW_STEPS, TOO_FEW
from partita.remedies import Remedy, any_of
from partita.runtime.engine.checks import AS_MANY_OR_ANEW, PLACEHOLDERS
from partita.runtime.pins import parse_pins
from partita.runtime.placeholders import placeholder_note
from partita.runtime.prefix_file import Said, read_said
from partita.runtime.text import Text, load_text, stop_token_ids

QUOTE = Remedy("quote it, if it is one prompt", ("partita", "generate", "{package}", "{prompt}"))
LIMITS_NOTE = "the package was opened before for the limits, so memory before loading is not that of a fresh process"
LIMIT_RUNS = 2
"""Runs per phase that tell what a step copies."""


@dataclass(slots=True)
class Outcome:
    """How the loop ended, where it did not end by itself."""

    interrupted: bool = False
    closed: bool = False
    """Nobody reads stdout any more."""
    refused: OSError | None = None
    """Why stdout took no more, where its reader did not just go away."""
    error: PartitaError | None = None


def run_generation(
    options: GenerateOptions, target: Target, prompts: Sequence[str], manifest: Manifest, sink: Sink | None
) -> int:
    """Load, generate, write the report to `sink`; returns the exit code."""
    parse_pins(target.pins, target.chain)  # what makes no sense is said before anything is opened
    check_placement(options, target)
    began = time.perf_counter()
    may_be_ids = not (options.chat or options.stop)
    batch = manifest.graph.batch_size
    if len(prompts) > batch and not options.token_ids and not any(" " in prompt for prompt in prompts):
        problem = f"{plural(len(prompts), 'prompt')} for a package of batch size {batch}"
        several = AS_MANY_OR_ANEW.filled(count=batch, batch_size=len(prompts), **PLACEHOLDERS)
        quoted = QUOTE.filled(package=options.package, prompt=" ".join(prompts))
        raise GenerationError(problem, remedy=any_of([quoted, several]))
    text = (
        None
        if options.token_ids
        else load_text(options.package, manifest.tokenizer, manifest.graph.max_length, takes_ids=may_be_ids)
    )
    tokenizer_seconds = time.perf_counter() - began
    said = None if options.prefix is None else read_said(options.prefix)
    ids = [tuple(_encode(options, text, prompt, said)) for prompt in prompts]
    with LocalEngine(
        options.package,
        manifest,
        target,
        threads=options.where.threads,
        observe=options.report is not None,
        refusal_seconds=options.probe_seconds,
        audience=TERMINAL,
        choice=options.choice,
    ) as engine:
        generation = begin(  # before the notes: an error is one line
            engine,
            ids,
            [options.sampling],
            text=text,
            stop=options.stop,
            stop_ids=stop_token_ids(options.package),
            prefill_chunk=options.prefill_chunk,
            adapters=[options.adapter] * len(ids),
            prefix=None if options.prefix is None else str(options.prefix),
            speculation=options.speculation,
        )
        notes = (*generation.notes, *_prefix_note(said, ids))
        say_notes(options, engine, ids, notes)
        outcome = _drive(options, generation)
        if options.as_json and not outcome.closed:
            record = _as_record(options, outcome, engine, generation, tokenizer_seconds, notes)
            _told(outcome, lambda: print_record(record))
        else:
            _finish_output(options, outcome, generation)
        _say_timings(engine, generation)
        cut_short = False
        if sink is not None:
            notes += (LIMITS_NOTE,) if options.limits.given() else ()
            asked = _report_request(options, outcome, generation, tokenizer_seconds, notes + target.notes)
            cut_short = write_report(sink, engine, asked)
    if outcome.error is not None:
        raise outcome.error
    if outcome.refused is not None:  # not before the report is written: it is of a run that was made
        raise outcome.refused
    return INTERRUPTED if outcome.interrupted or cut_short else 0


def say_notes(
    options: GenerateOptions, engine: LocalEngine, ids: Sequence[Sequence[int]] = (), notes: Sequence[str] = ()
) -> None:
    """What the user should know before the first token."""
    say_chain(engine.target, engine.runner.resolutions)
    known = (*map(idle, engine.opened.idle), *unverified(engine.manifest.verification), *inferred(engine.manifest))
    for line in filter(None, (*known, placeholder_note(options.package, ids), *notes)):
        say(line)


def check_placement(options: GenerateOptions, target: Target) -> None:
    """Raise ProviderError, before the first token, when the placement does not keep to the limits.

    Bytes are known only from runs, so the package is opened for this alone and run on tokens that mean nothing.
    """
    if not options.limits.given():
        return
    from partita.library.place_run import place

    placing = PlaceOptions(
        options.package,
        threads=options.where.threads,
        runs=LIMIT_RUNS,
        probe_seconds=0.0,
        **asdict(options.limits),
        **asdict(options.choice),
    )
    report, error = place(placing, target, whole=False, audience=TERMINAL)
    over = limits_error(report)
    if error is not None:
        raise error
    if over is not None:
        raise over


def _prefix_note(said: Said | None, ids: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """How much of a prefix the prompts have."""
    if said is None:
        return ()
    known = [min(len(commonprefix([said.tokens, tuple(prompt)])), len(prompt) - 1) for prompt in ids]
    return (f"{min(known)} tokens of each prompt come from the prefix, and are not read again",)


def _encode(options: GenerateOptions, text: Text | None, prompt: str, said: Said | None) -> Sequence[int]:
    if text is None:
        return ids_after(said, parse_ids(prompt))
    if said is not None:
        return prompt_after(said, prompt, text, chat=options.chat)
    if options.chat:
        return text.encode_chat(prompt, options.system)
    if not prompt:
        raise GenerationError("the prompt is empty; give some text to continue")
    return text.encode(prompt)


def _drive(options: GenerateOptions, generation: Generation) -> Outcome:
    """Go through the steps, until they end or nobody wants more; the text of a single row is shown as it comes."""
    outcome = Outcome()
    live = len(generation.texts) == 1 and not options.as_json
    shown = 0
    try:
        for step in generation:
            if live and (piece := _piece(options, step)):
                shown += len(step.text)
                _say(options, outcome, piece)
            if outcome.closed:
                break
    except KeyboardInterrupt:
        outcome.interrupted = True
    except PartitaError as error:
        outcome.error = error
    generation.close()
    held = generation.text[shown:]  # a row that was cut off may have held text back
    if live and held and not outcome.closed:
        _say(options, outcome, held)
    return outcome


def _piece(options: GenerateOptions, step: GenerationStep) -> str:
    """What a step adds to the first row, as the user reads it."""
    return _ids(step.tokens[0]) if options.token_ids else step.text


def _ids(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def _say(options: GenerateOptions, outcome: Outcome, text: str) -> None:
    """Text of the answer to stdout, or to stderr when stdout is for the report."""
    write = write_stderr if options.report == STDOUT else write_stdout
    _told(outcome, lambda: write(text))


def _told(outcome: Outcome, write: Callable[[], bool | None]) -> None:
    """Write to stdout; what keeps the text from being read ends the answer, and not the report of the run."""
    try:
        outcome.closed = write() is False
    except OSError as error:
        outcome.closed, outcome.refused = True, error


def _finish_output(options: GenerateOptions, outcome: Outcome, generation: Generation) -> None:
    """Everything that stdout gets as text once the loop is over."""
    if outcome.closed:
        return
    answers = generation.answers
    if len(answers) == 1:
        _say(options, outcome, "\n")
        return
    texts = [_ids(answer.tokens) if options.token_ids else answer.text for answer in answers]
    _say(options, outcome, "".join(f"[{number}] {text}\n" for number, text in enumerate(texts, start=1)))


def _as_record(
    options: GenerateOptions,
    outcome: Outcome,
    engine: LocalEngine,
    generation: Generation,
    tokenizer_seconds: float,
    notes: tuple[str, ...],
) -> GenerateResult:
    """The whole of a generation, for `--json`."""
    return GenerateResult(
        package=str(options.package),
        chain=tuple(
            ChainLink(provider=entry.provider, status=entry.status, reason=entry.reason)
            for entry in engine.opened.chain
        ),
        chain_source=engine.target.source,
        options=SamplingOptions(**options.sampling.figures()),
        adapter=options.adapter,
        prefill_chunk_tokens=generation.begun.chunk_tokens,
        threads=options.where.threads,
        load_seconds=engine.opened.load_seconds,
        tokenizer_load_seconds=tokenizer_seconds,
        rows=tuple(
            GeneratedRow(
                text=None if options.token_ids else answer.text,
                tokens=answer.tokens,
                prompt_tokens=answer.prompt_tokens,
                finish_reason=answer.finish_reason,
            )
            for answer in generation.answers
        ),
        timings=GenerationTimings(**generation.timings),
        speculation=generation.speculation,
        notes=notes + engine.target.notes,
        error=fact_of(outcome.error) if outcome.error else None,
    )


def _say_timings(engine: LocalEngine, generation: Generation) -> None:
    """One line on stderr."""
    figures = generation.timings
    parts = [f"load {engine.opened.load_seconds:.2f} s"]
    if figures["prefill_tokens_per_second"]:
        parts.append(f"prompt {figures['prompt_tokens']} tokens at {figures['prefill_tokens_per_second']:.0f} tokens/s")
    if figures["first_token_seconds"]:
        parts.append(f"first token after {figures['first_token_seconds'] * 1e3:.0f} ms")
    if figures["decode_tokens_per_second"]:
        few = f" ({TOO_FEW})" if figures["decode_steps"] < FEW_STEPS else ""
        parts.append(f"{figures['decode_tokens']} more at {figures['decode_tokens_per_second']:.1f} tokens/s{few}")
    drafts = generation.speculation
    if drafts is not None and drafts.acceptance_rate is not None:
        speed = "" if drafts.speedup is None else f", {drafts.speedup:.2f} times the speed without"
        parts.append(f"{percent(drafts.acceptance_rate)} of {drafts.drafted} draft tokens accepted{speed}")
    reasons = sorted({answer.finish_reason or "unfinished" for answer in generation.answers})
    parts.append(f"finish: {', '.join(reasons)}")
    note(fold("; ".join(parts), sys.stderr, 2))


def _report_request(
    options: GenerateOptions,
    outcome: Outcome,
    generation: Generation,
    tokenizer_seconds: float,
    notes: tuple[str, ...],
) -> ReportRequest:
    """What the report says of the generation beside the facts of the run."""
    return ReportRequest(
        finish_reason="interrupted" if outcome.interrupted else "error" if outcome.error else generation.finish_reason,
        finish_detail=str(outcome.error) if outcome.error else _unread(outcome),
        complete=outcome.error is None and not outcome.interrupted,
        tokenizer_load_seconds=tokenizer_seconds,
        notes=notes,
        options={**told_options([options.sampling]), **_prefix_option(options)},
        limits=options.limits,
        probe_seconds=options.probe_seconds,
    )


def _unread(outcome: Outcome) -> str:
    """Why the answer was not read to its end; empty where it was."""
    if outcome.refused is not None and outcome.refused.errno != errno.EBADF:  # which a closed one gives
        return f"stdout: {outcome.refused.strerror or outcome.refused}"
    return "stdout was closed" if outcome.closed else ""


def _prefix_option(options: GenerateOptions) -> dict[str, str]:
    """The prefix, as a report repeats it."""
    return {} if options.prefix is None else {"prefix": str(options.prefix)}


def write_report(sink: Sink, engine: LocalEngine, asked: ReportRequest) -> bool:
    """Write the report; whether Ctrl-C ended the experiments for it."""
    report = engine.report(asked)
    sink.write(storage.to_json(report))
    if isinstance(sink, Output):
        say_written("report", sink.path)
    return bool(report.interrupted)
