"""A generation as its user meets it: text out as it comes, timings on stderr, and a report if asked for.

The loop itself is `partita.runtime.generate`; here tokens become text, Ctrl-C becomes a finish reason, and every way a
run can end still writes its report.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from partita.commands.audience import TERMINAL, say_chain
from partita.commands.generate_options import GenerateOptions
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
from partita.diagnosis.session_index import PHASES
from partita.errors import INTERRUPTED, GenerationError, PartitaError, UsageError
from partita.files import Output
from partita.library.chain import Target
from partita.library.probing import package_refused, probe_package, was_interrupted
from partita.library.run_report import Asked, limits_error, make_report
from partita.library.sampling import MAX_NEW_TOKENS
from partita.package import Manifest
from partita.partition_reports import storage
from partita.partition_reports.timing import step_times
from partita.runtime.chain import ChainError, idle_providers
from partita.runtime.engine.recorder import Step
from partita.runtime.generate import PREFILL_CHUNK_TOKENS, check_prompts, generate
from partita.runtime.optimised import with_optimised
from partita.runtime.ort_errors import NoKernelError
from partita.runtime.pins import Pin, parse_pins
from partita.runtime.placeholders import placeholder_note
from partita.runtime.run_facts import first_token_seconds, run_facts, step_fact
from partita.runtime.runner import Runner, load_runner
from partita.runtime.text import Text, TextStream, load_text, stop_token_ids

LIMITS_NOTE = "the package was opened before for the limits, so memory before loading is not that of a fresh process"
LIMIT_RUNS = 2
"""Runs per phase that tell what a step copies."""


@dataclass(slots=True)
class Row:
    """What one row of the batch has said so far."""

    prompt: list[int]
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: str | None = None

    def text(self) -> str:
        """The answer: text, or token ids when there is no tokenizer."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Outcome:
    """How the loop ended."""

    rows: list[Row]
    interrupted: bool = False
    closed: bool = False
    """Nobody reads stdout any more."""
    error: PartitaError | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(row.prompt) for row in self.rows)

    def finish_reason(self) -> str | None:
        """Finish reason for the report where the loop cannot tell it from its steps."""
        if self.error is not None:
            return "error"
        if self.interrupted or (self.closed and any(row.finish is None for row in self.rows)):
            return "interrupted"
        reasons = {row.finish for row in self.rows}
        return "stop" if reasons == {"stop"} else None


def run_generation(
    options: GenerateOptions, target: Target, prompts: Sequence[str], manifest: Manifest, sink: Sink | None
) -> int:
    """Load, generate, write the report to `sink`; returns the exit code."""
    pins = parse_pins(target.pins, target.chain)
    check_placement(options, target)
    began = time.perf_counter()
    text = None if options.token_ids else load_text(options.package, manifest.tokenizer)
    tokenizer_seconds = time.perf_counter() - began
    ids = [_encode(options, text, prompt) for prompt in prompts]
    with open_package(options, target, manifest, pins) as runner:
        rows = [Row(prompt, text.stream(prompt, options.stop) if text else None) for prompt in ids]
        check_prompts(runner, ids)  # before the notes: an error is one line
        say_chain(target, runner.resolutions)
        for name in sorted({name for entry in runner.graphs for name in idle_providers(entry.session, entry.model)}):
            note(f"note: {name} is in the chain and took no node; place shows why")
        if runner.manifest.verification.status == "unverified":
            note(f"note: this package is unverified: {runner.manifest.verification.detail}")
        for_text = placeholder_note(options.package, ids)
        if for_text:
            note(f"note: {for_text}")
        ignored = chunk_note(options, runner, max(map(len, ids)))
        if ignored:
            note(f"note: {ignored}")
        outcome = _drive(options, runner, rows, stop_token_ids(options.package))
        if options.as_json and not outcome.closed:
            print_record(as_record(options, outcome, runner, target, tokenizer_seconds))
        else:
            _finish_output(options, outcome)
        _say_timings(runner, outcome)
        cut_short = sink is not None and _write_report(options, sink, runner, outcome, target, tokenizer_seconds)
    if outcome.error is not None:
        raise outcome.error
    return INTERRUPTED if outcome.interrupted or cut_short else 0


def open_package(options: GenerateOptions, target: Target, manifest: Manifest, pins: tuple[Pin, ...]) -> Runner:
    """The runner. Raises ProviderError with what experiments tell when the chain cannot be honoured."""
    try:
        return load_runner(
            options.package,
            target.chain,
            threads=options.where.threads,
            observe=options.report is not None,
            manifest=manifest,
            options=target.options,
            pins=pins,
        )
    except (ChainError, NoKernelError) as error:
        raise package_refused(error, options.probe_seconds, TERMINAL) from error


def check_placement(options: GenerateOptions, target: Target) -> None:
    """Raise ProviderError, before the first token, when the placement does not keep to the limits.

    Bytes are known only from runs, so the package is opened for this alone and run on tokens that mean nothing.
    """
    if not options.limits.given():
        return
    from partita.library.place_options import PlaceOptions
    from partita.library.place_run import place

    placing = PlaceOptions(options.package, options.where, runs=LIMIT_RUNS, limits=options.limits, probe_seconds=0.0)
    report, error = place(placing, target, whole=False, audience=TERMINAL)
    over = limits_error(report)
    if error is not None:
        raise error
    if over is not None:
        raise over


def _encode(options: GenerateOptions, text: Text | None, prompt: str) -> list[int]:
    if text is None:
        return _parse_ids(prompt)
    if options.chat:
        return text.encode_chat(prompt, options.system)
    if not prompt:
        raise GenerationError("the prompt is empty; give some text to continue")
    return text.encode(prompt)


def _parse_ids(prompt: str) -> list[int]:
    words = prompt.replace(",", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise UsageError(f"--token-ids: {prompt[:40]!r} is not a list of token ids such as 1,45,7") from error


def _drive(options: GenerateOptions, runner: Runner, rows: list[Row], stop_ids: Collection[int]) -> Outcome:
    """Run the loop and hand its tokens to the rows, until it ends by itself or otherwise."""
    outcome = Outcome(rows)
    loop = generate(
        runner,
        [row.prompt for row in rows],
        max_new_tokens=options.sampling.max_new_tokens or MAX_NEW_TOKENS,
        sampler=options.sampling.sampler(),
        stop_ids=stop_ids,
        prefill_chunk=_wanted_chunk(options),
    )
    live = len(rows) == 1 and not options.as_json
    show = _Printer(options, live=live)
    with closing(loop):
        try:
            for step in loop:
                for row, tokens, finish in zip(rows, step.tokens, step.finish, strict=True):
                    _take(row, tokens, finish, show)
                if all(row.finish is not None for row in rows) or show.closed:
                    break
        except KeyboardInterrupt:
            outcome.interrupted = True
        except PartitaError as error:
            outcome.error = error
    for row in rows:
        if row.stream is not None:
            show(row, row.stream.finish())
    outcome.closed = show.closed
    return outcome


class _Printer:
    """Hands pieces of an answer to its row and, for a single row, to the user as they come."""

    def __init__(self, options: GenerateOptions, *, live: bool) -> None:
        self.options, self.live, self.closed = options, live, False

    def __call__(self, row: Row, piece: str) -> None:
        row.pieces.append(piece)
        if self.live and piece:
            self.closed = self.closed or not _say(self.options, piece)


def _say(options: GenerateOptions, text: str) -> bool:
    """Text of the answer to stdout, or to stderr when stdout is for the report; False when nobody reads it any more."""
    return write_stderr(text) if options.report == STDOUT else write_stdout(text)


def _take(row: Row, tokens: Sequence[int], finish: str | None, show: _Printer) -> None:
    """Add the tokens of one step to a row. A row that met a stop string is over, whatever the loop still computes for
    it.
    """
    if row.finish is not None:
        return
    row.finish = finish  # also without a token: a prompt that fills the cache ends with none
    for token in tokens:
        row.tokens.append(token)
        if row.stream is None:
            show(row, f"{token} ")
            continue
        show(row, row.stream.push(token))
        if row.stream.stopped:
            row.finish = "stop"
            return


def _finish_output(options: GenerateOptions, outcome: Outcome) -> None:
    """Everything that stdout gets as text once the loop is over."""
    if outcome.closed:
        return
    if len(outcome.rows) == 1:
        _say(options, "\n")
    else:
        _say(options, "".join(f"[{number}] {row.text()}\n" for number, row in enumerate(outcome.rows, start=1)))


def as_record(
    options: GenerateOptions, outcome: Outcome, runner: Runner, target: Target, tokenizer_seconds: float
) -> GenerateResult:
    """The whole of a generation, for `--json`."""
    ignored = chunk_note(options, runner, outcome.longest)
    error = outcome.error
    return GenerateResult(
        package=str(options.package),
        chain=tuple(
            ChainLink(provider=entry.provider.ort_name, status=entry.status, reason=entry.reason)
            for entry in runner.resolutions
        ),
        chain_source=target.source,
        options=SamplingOptions(**options.sampling.figures()),
        prefill_chunk_tokens=_effective_chunk(options, runner, outcome.longest),
        threads=options.where.threads,
        load_seconds=load_seconds(runner),
        tokenizer_load_seconds=tokenizer_seconds,
        rows=tuple(
            GeneratedRow(
                text=row.text() if row.stream is not None else None,
                tokens=tuple(row.tokens),
                prompt_tokens=len(row.prompt),
                finish_reason=row.finish or outcome.finish_reason(),
            )
            for row in outcome.rows
        ),
        timings=GenerationTimings(**timings(runner.steps, len(outcome.rows))),
        notes=((ignored,) if ignored else ()) + target.notes,
        error=fact_of(error) if error else None,
    )


def load_seconds(runner: Runner) -> float:
    """Time to open the sessions."""
    return sum(graph.session.load_seconds for graph in runner.graphs)


def timings(steps: Sequence[Step], rows: int) -> dict[str, Any]:
    """Speed of a generation, as the report has it: steps under observation are left out, if others are left.

    `rows`: batch size.
    """
    facts = [step_fact(step) for step in steps]
    prefill, decode = (step_times(facts, phase, rows) for phase in PHASES)
    return {
        "prompt_tokens": sum(step.row_tokens for step in steps if step.phase == "prefill" and not step.again),
        "prefill_seconds": prefill.seconds,
        "prefill_tokens_per_second": prefill.tokens_per_second,
        "first_token_seconds": first_token_seconds(steps),
        "decode_steps": decode.steps,
        "decode_tokens": decode.tokens,
        "decode_tokens_per_second": decode.tokens_per_second,
        "decode_p50_ms": decode.p50_ms,
        "overhead_p50_ms": decode.overhead_p50_ms,
    }


def _say_timings(runner: Runner, outcome: Outcome) -> None:
    """One line on stderr."""
    figures = timings(runner.steps, len(outcome.rows))
    parts = [f"load {load_seconds(runner):.2f} s"]
    if figures["prefill_tokens_per_second"]:
        parts.append(f"prompt {figures['prompt_tokens']} tokens at {figures['prefill_tokens_per_second']:.0f} tokens/s")
    if figures["first_token_seconds"]:
        parts.append(f"first token after {figures['first_token_seconds'] * 1e3:.0f} ms")
    if figures["decode_tokens_per_second"]:
        parts.append(f"{figures['decode_tokens']} more at {figures['decode_tokens_per_second']:.1f} tokens/s")
    reasons = sorted({row.finish or outcome.finish_reason() or "unfinished" for row in outcome.rows})
    parts.append(f"finish: {', '.join(reasons)}")
    note(fold("; ".join(parts), sys.stderr, 2))


def _wanted_chunk(options: GenerateOptions) -> int:
    return PREFILL_CHUNK_TOKENS if options.prefill_chunk is None else options.prefill_chunk


def _effective_chunk(options: GenerateOptions, runner: Runner, longest: int) -> int:
    """Prompt tokens per run as this package takes them, which is not always as asked. `longest`: of the prompts."""
    return runner.executor.graphs.chunk_of(_wanted_chunk(options), longest)


def chunk_note(options: GenerateOptions, runner: Runner, longest: int) -> str:
    """A sentence when the package does not take --prefill-chunk as it was given; empty otherwise."""
    taken = _effective_chunk(options, runner, longest)
    if options.prefill_chunk is None or options.prefill_chunk == taken:
        return ""
    fixed = runner.executor.graphs.chunk is not None
    why = "its prefill graph has a fixed size" if fixed else "its attention reads a batch's prompts whole"
    return f"--prefill-chunk {options.prefill_chunk} is ignored: a run of this package takes {taken}, for {why}"


def told(value: float | str | None) -> str:
    """An option for the report."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _write_report(
    options: GenerateOptions, sink: Sink, runner: Runner, outcome: Outcome, target: Target, tokenizer_seconds: float
) -> bool:
    """Write the report; whether Ctrl-C ended the experiments for it."""
    longest = outcome.longest
    ignored = chunk_note(options, runner, longest)
    facts = run_facts(
        runner,
        finish_reason=outcome.finish_reason(),
        finish_detail=str(outcome.error) if outcome.error else "stdout was closed" if outcome.closed else "",
        tokenizer_load_seconds=tokenizer_seconds,
        notes=((ignored,) if ignored else ()) + ((LIMITS_NOTE,) if options.limits.given() else ()) + target.notes,
    )
    if outcome.error is None and not outcome.interrupted:
        facts = with_optimised(facts, [entry.session for entry in runner.graphs])
    asked = Asked(
        verb="generate",
        path=options.package,
        chain=tuple(resolution.provider.ort_name for resolution in runner.resolutions),
        chain_source=target.source,
        options={
            **{name: told(value) for name, value in options.sampling.figures().items() if name != "max_new_tokens"},
            **({"sampling": options.sampling.source} if options.sampling.source else {}),
            **{f"{name}.{key}": value for name, given in target.options.items() for key, value in given.items()},
            **({"pin": ", ".join(target.pins)} if target.pins else {}),
        },
        threads=options.where.threads,
        prompt_tokens=longest,
        max_new_tokens=options.sampling.max_new_tokens or MAX_NEW_TOKENS,
        limits=options.limits,
        prefill_chunk_tokens=_effective_chunk(options, runner, longest),
    )
    facts, resolutions = probe_package(facts, runner.resolutions, options.package, options.probe_seconds, TERMINAL)
    report = make_report(options.package, runner.manifest, facts, resolutions, asked)
    sink.write(storage.to_json(report))
    if isinstance(sink, Output):
        say_written("report", sink.path)
    return was_interrupted(report.notes)
