"""A generation as its caller meets it: an iterator of steps, and what each row of the batch has said so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from partita.diagnosis.session_index import PHASES
from partita.errors import GenerationError
from partita.library.edge import ArgumentError
from partita.library.engine import Engine, GenerateRequest, RowRequest
from partita.library.notes import chunk_ignored
from partita.library.sampling import Sampling
from partita.library.speculation import NO_SPECULATION, Speculation
from partita.partition_reports.speculation import Speculation as SpeculationFigures
from partita.partition_reports.speculation import speculation_figures
from partita.partition_reports.timing import step_times
from partita.runtime.engine.recorder import Step
from partita.runtime.text import Text, TextStream

FinishReason = Literal["stop", "length", "cache_full", "interrupted", "error"]
Guard = Callable[[], AbstractContextManager[None]]


@dataclass(slots=True)
class Row:
    """What one row of the batch has said so far."""

    prompt: tuple[int, ...]
    stream: TextStream | None
    """None without a tokenizer."""
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: str | None = None

    def text(self) -> str:
        """The answer; empty without a tokenizer."""
        return "".join(self.pieces)

    def take(self, tokens: Sequence[int], finish: str | None) -> tuple[int, ...]:
        """Add the tokens of one step; those that belong to the answer.

        A row that met a stop string is over, whatever the loop still computes for it.
        """
        if self.finish is not None:
            return ()
        self.finish = finish  # also without a token: logits that are not finite end it with none
        taken = []
        for token in tokens:
            taken.append(token)
            if self.stream is None:
                continue
            self.pieces.append(self.stream.push(token))
            if self.stream.stopped:
                self.finish = "stop"
                break
        self.tokens += taken
        if self.finish is not None:
            self.end()
        return tuple(taken)

    def end(self) -> None:
        """Nothing more will come: text that was held back is part of the answer."""
        if self.stream is not None:
            self.pieces.append(self.stream.finish())
            self.stream = None


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """One step: a run of the model, and what it added to each row of the batch."""

    index: int
    """0-based."""
    phase: Literal["prefill", "decode"]
    """prefill while any row still reads its prompt."""
    texts: tuple[str, ...]
    """New text of each row: whole characters only, so often none."""
    tokens: tuple[tuple[int, ...], ...]
    """New tokens of each row."""
    finish_reasons: tuple[str | None, ...]
    """`stop`, `length` or `cache_full` of each row that has finished."""
    seconds: float
    """Wall time of the run."""

    @property
    def text(self) -> str:
        """New text of the first row, which at batch size 1 is the only one."""
        return self.texts[0]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt, as far as it goes."""

    text: str
    """Without special tokens and what follows a stop string; empty for a package without a tokenizer."""
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason | None
    """None while it goes on."""
    sampling: Sampling
    """With a value for everything: the same gives the same answer."""


class Generation:
    """An iterator of `GenerationStep`. What it has so far is in `text`, `answers` and `timings`; `run` goes to the end.

    Ctrl-C and errors end it, and so does leaving it: `close` it, use it as a context manager, or just begin another.
    Going on with one that something else has ended since raises GenerationError.
    """

    def __init__(
        self, engine: Engine, rows: Sequence[Row], request: GenerateRequest, guard: Guard = nullcontext
    ) -> None:
        """Begin. `guard` is entered around every step. Raises GenerationError for prompts that cannot be taken."""
        self._engine, self._rows, self._request, self._guard = engine, tuple(rows), request, guard
        self.begun = engine.begin(request)
        self.steps: list[Step] = []
        """As the engine recorded them."""
        self.error: BaseException | None = None
        """What ended it, other than itself."""
        self._over = False
        self._displaced: str | None = None
        """What the model was asked since, which ended it; whoever goes on with it is told."""
        self.keeps: object = None
        """What is to last as long as the generation goes on."""
        self._taking = threading.RLock()
        """Held while a step is taken in, or something else ends it: none is taken in by half."""
        self._stepping = threading.RLock()
        """Held for the whole of a step: threads that go on with it do so one after the other."""

    def __iter__(self) -> Iterator[GenerationStep]:
        return self

    def __next__(self) -> GenerationStep:
        with self._stepping:
            return self._next()

    def _next(self) -> GenerationStep:
        if self._over:
            if self._displaced is not None:
                raise GenerationError(self._displaced)
            raise StopIteration
        before = [len(row.pieces) for row in self._rows]
        try:
            with self._guard():
                step = self._engine.step(self.begun.number)
                tokens = None if step is None else self._take(step)
        except BaseException as error:
            if self._displaced is None:
                self.error = error
            self.close()
            raise
        if step is None or tokens is None:
            self.close()
            raise StopIteration
        return GenerationStep(
            index=step.index,
            phase=step.phase,
            texts=tuple("".join(row.pieces[at:]) for row, at in zip(self._rows, before, strict=True)),
            tokens=tokens,
            finish_reasons=tuple(row.finish for row in self._rows),
            seconds=step.run_seconds,
        )

    def _take(self, step: Step) -> tuple[tuple[int, ...], ...] | None:
        """Take in what a step added; the new tokens of each row, None where it was closed meanwhile."""
        with self._taking:
            if self._displaced is not None:
                raise GenerationError(self._displaced)
            if self._over:
                return None
            self.steps.append(step)
            tokens = tuple(
                row.take(new, finish) for row, new, finish in zip(self._rows, step.tokens, step.finish, strict=True)
            )
            if all(row.finish is not None for row in self._rows):
                self.close()
            return tokens

    def run(self) -> Generation:
        """Go to the end; the generation itself, for `model.generate(...).run().text`."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """End it here, from any thread. May be called twice; what there is stays."""
        with self._taking:
            self._over, self.keeps = True, None
            for row in self._rows:
                with suppress(Exception):  # a tokenizer that fails is told of where it fails first
                    row.end()

    def displace(self, why: str) -> None:
        """End it because the model was asked something else, as `why` says. Its steps so far stay; asked for another,
        it raises that: an answer that is cut short must not look like a whole one.
        """
        with self._taking:
            if not self._over:
                self._displaced = why
                self.close()

    def __repr__(self) -> str:
        counts = [len(row.tokens) for row in self._rows]
        state = self.finish_reason or ("going on" if any(counts) else "not started: iterate it or call .run()")
        return f"<partita.Generation: {'+'.join(map(str, counts))} new tokens, {state}>"

    def __reduce__(self) -> NoReturn:
        raise ArgumentError("a generation cannot be pickled or copied; take its answers, which can")

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing of how it is done, and no error."""
        return chunk_ignored(self._request.prefill_chunk, self.begun)

    @property
    def over(self) -> bool:
        """True once the generation has finished, failed, or been closed."""
        return self._over

    @property
    def text(self) -> str:
        """The text of the first row so far, which at batch size 1 is the only one."""
        return self._rows[0].text()

    @property
    def texts(self) -> tuple[str, ...]:
        """Generated text so far, one string per prompt."""
        return tuple(row.text() for row in self._rows)

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """The new tokens of each row so far."""
        return tuple(tuple(row.tokens) for row in self._rows)

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Text, token ids, finish reason and sampling options of each prompt, complete or not."""
        return tuple(
            Answer(row.text(), tuple(row.tokens), len(row.prompt), self._finish(row), asked.sampling)
            for row, asked in zip(self._rows, self._request.rows, strict=True)
        )

    @property
    def timings(self) -> dict[str, Any]:
        """Speed so far, by the names of `generate --json`; None where too little was measured to tell."""
        return timings(self.steps, len(self._rows))

    @property
    def speculation(self) -> SpeculationFigures | None:
        """Figures of speculative decoding so far; None without it."""
        from partita.runtime.run_facts import step_fact

        return speculation_figures(self._request.speculation.fact(), [step_fact(step) for step in self.steps])

    @property
    def finish_reason(self) -> FinishReason | None:
        """The most severe finish reason of all rows, in the order error, interrupted, cache_full, length, stop; None
        while it goes on."""
        reasons = [self._finish(row) for row in self._rows]
        order: tuple[FinishReason, ...] = ("error", "interrupted", "cache_full", "length", "stop")
        return None if None in reasons else next(reason for reason in order if reason in reasons)

    def _finish(self, row: Row) -> Any:
        if row.finish is not None or not self._over:
            return row.finish
        return "error" if isinstance(self.error, Exception) else "interrupted"


def begin(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    samplings: Sequence[Sampling],
    *,
    text: Text | None,
    stop: Sequence[str] = (),
    stop_ids: Collection[int] = (),
    prefill_chunk: int | None = None,
    adapters: Sequence[str | None] = (),
    prefix: str | None = None,
    one_sampler: bool = True,
    speculation: Speculation = NO_SPECULATION,
    guard: Guard = nullcontext,
) -> Generation:
    """Begin a generation: a prompt of token ids for each row of the batch, and completed options for each or for all.

    `text`: the tokenizer, None for a generation without text. `stop`: texts to stop at. `guard` is entered around every
    step. `adapters`: one of the package's for each row, by name, or None. `prefix`: file of a prefix that every prompt
    begins with. Raises GenerationError for prompts that cannot be taken, UsageError.
    """
    each = samplings if len(samplings) == len(prompts) else [*samplings] * len(prompts)
    names = adapters or [None] * len(prompts)
    common = names[0] if len(set(names)) == 1 else None
    request = GenerateRequest(
        tuple(
            RowRequest(prompt, one, adapter=None if name == common else name)
            for prompt, one, name in zip(prompts, each, names, strict=True)
        ),
        tuple(sorted(stop_ids)),
        prefill_chunk,
        common,
        prefix,
        one_sampler,
        speculation,
    )
    rows = [Row(prompt, None) for prompt in prompts]
    generation = Generation(engine, rows, request, guard)
    if text is not None:
        for row in rows:  # once the tokens are known to be some: a tokenizer takes no other numbers
            row.stream = text.stream(row.prompt, stop, stop_ids)
    return generation


def timings(steps: Sequence[Step], rows: int) -> dict[str, Any]:
    """Speed of a generation, as the report has it: steps under observation are left out, if others are left.

    `rows`: batch size.
    """
    # Needs ONNX Runtime, which a process whose packages run in children does without.
    from partita.runtime.run_facts import first_token_seconds, step_fact

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
        "decode_p50_ms": decode.step_p50_ms,
        "overhead_p50_ms": decode.overhead_p50_ms,
    }


def told_options(samplings: Sequence[Sampling]) -> dict[str, str]:
    """How tokens were chosen, as a report repeats it; values of rows that differ stand beside each other."""
    names = [name for name in samplings[0].figures() if name != "max_new_tokens"]
    columns = {name: [_told(sampling.figures()[name]) for sampling in samplings] for name in names}
    columns["sampling"] = [sampling.source or "" for sampling in samplings]
    found = {name: values[0] if len(set(values)) == 1 else " / ".join(values) for name, values in columns.items()}
    return {name: value for name, value in found.items() if value}


def _told(value: float | str | None) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
