"""The completions of one call: an iterator of steps with the output of each prompt."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from partita.diagnosis.session_index import PHASES
from partita.errors import GenerationError, PartitaError
from partita.library.api import public_error, public_errors
from partita.library.engine.base import Engine
from partita.library.engine.requests import (
    CompletionResult,
    FinishReason,
    RequestOutput,
    Ticket,
    Work,
    speculation_fact,
)
from partita.library.sampling import Sampling
from partita.options.generation import SpeculationOptions
from partita.partition_reports.cost import speculation_figures, step_times
from partita.partition_reports.records import Speculation as SpeculationFigures
from partita.runtime.generate.record import Step, first_token_seconds

SEVEREST: tuple[FinishReason, ...] = ("error", "interrupted", "cache_full", "length", "stop")
"""Finish reasons, the most severe first."""


class GenerationStep(NamedTuple):
    """One step: a run of the model, and its output for each prompt. A tuple for speed: every token makes one."""

    index: int  # type: ignore[assignment] # instead of the method of tuples
    """0-based, counting steps in which a prompt of the call had a row."""
    phase: Literal["prefill", "decode"]
    """prefill if any row is in its prompt, else decode."""
    texts: tuple[str, ...]
    """New text for each prompt: whole characters, so often empty."""
    tokens: tuple[tuple[int, ...], ...]
    """New tokens for each prompt."""
    finish_reasons: tuple[str | None, ...]
    """`stop`, `length`, `cache_full` or `error` of each finished prompt."""
    seconds: float
    """Wall time of the run."""

    @property
    def text(self) -> str:
        """New text for the first prompt."""
        return self.texts[0]


class Progress:
    """The requests of one call and their steps."""

    def __init__(self, samplings: Sequence[Sampling], prompts: int) -> None:
        """`samplings`: as requested, one for all prompts or one for each. `prompts`: number of them."""
        self.samplings = tuple(samplings)
        self.tickets: list[Ticket] = []
        self.steps: list[Step] = []
        self.ready: deque[GenerationStep] = deque()
        self.closed = False
        self.open = prompts
        """Number of unfinished requests."""
        self._texts = [""] * prompts
        self._tokens: list[tuple[int, ...]] = [()] * prompts
        """Output of each prompt in the current step."""
        self._finish: tuple[str | None, ...] = (None,) * prompts

    def submit(self, engine: Engine, work: Work) -> None:
        """Queue a prompt."""
        index = len(self.tickets)

        def receive(ticket: Ticket, piece: RequestOutput) -> None:
            self._texts[index], self._tokens[index], _, reason = piece
            if reason is not None:
                self._finish = (*self._finish[:index], reason, *self._finish[index + 1 :])
                self.open -= 1

        self.tickets.append(engine.submit(work, receive, self._on_step))

    def _on_step(self, step: Step) -> None:
        steps, texts, tokens = self.steps, self._texts, self._tokens
        index, rows = len(steps), len(texts)
        steps.append(step)
        self.ready.append(
            GenerationStep(index, step.phase, tuple(texts), tuple(tokens), self._finish, step.run_seconds)
        )
        self._texts, self._tokens = [""] * rows, [()] * rows

    @property
    def error(self) -> PartitaError | None:
        """The error of the first request that has one."""
        return next((ticket.error for ticket in self.tickets if ticket.error is not None), None)

    def finish(self, ticket: Ticket) -> Any:
        """The finish reason of a request: `interrupted` if it was closed before its end."""
        return ticket.finish or ("interrupted" if self.closed else None)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The most severe finish reason of all requests; None while one is running."""
        reasons = {self.finish(ticket) for ticket in self.tickets}
        return None if None in reasons else next(reason for reason in SEVEREST if reason in reasons)

    def cancel(self) -> None:
        """End unfinished requests."""
        self.closed = True
        for ticket in self.tickets:
            if ticket.state != "finished":
                ticket.cancel()


class Generation:
    """An iterator of `GenerationStep`. `text`, `texts`, `tokens` and `results` run it to its end, unless it was
    iterated: then they have the output so far.

    Ctrl-C ends it, as do `close`, leaving its `with` block, and dropping it. The error of a prompt is raised when the
    other prompts have finished. Several generations of a model share its batch.
    """

    def __init__(
        self,
        engine: Engine,
        works: Sequence[Work],
        chunk: int,
        *,
        samplings: Sequence[Sampling],
        speculation: SpeculationOptions,
    ) -> None:
        """Queue the requests on an open batch. `chunk`: prompt tokens per run."""
        self.chunk = chunk
        self._engine: Engine | None = engine
        """None when finished, so that it does not keep the model open."""
        self._slots, self._speculation = engine.slots, speculation
        self.progress = Progress(samplings, len(works))
        self.error: BaseException | None = None
        """The error that ended it."""
        self._started = False
        for work in works:
            self.progress.submit(engine, work)
        weakref.finalize(self, self.progress.cancel).atexit = False

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> GenerationStep:
        progress, engine = self.progress, self._engine
        self._started = True
        try:
            while engine is not None and progress.open and not progress.ready and not progress.closed:
                if not engine.step() and progress.open and not progress.ready and not progress.closed:
                    raise GenerationError("no request can start; this is a bug in Partita")
        except BaseException as error:
            progress.cancel()
            self.error = public_error(error) if isinstance(error, Exception) else error
            if self.error is error:
                raise
            raise self.error from error
        if progress.ready and not progress.closed:
            return progress.ready.popleft()
        self._engine = None
        if self.error is None and progress.error is not None:
            self.error = progress.error
            with public_errors():
                raise self.error
        raise StopIteration

    def run(self) -> Generation:
        """Run to the end; return the generation itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """End it, from any thread. May be called repeatedly; the output so far is kept."""
        self.progress.cancel()
        engine, self._engine = self._engine, None
        with public_errors():
            while engine is not None and any(ticket.state != "finished" for ticket in self.progress.tickets):
                if not engine.step():
                    break

    def __repr__(self) -> str:
        counts = [len(ticket.tokens) for ticket in self.progress.tickets]
        state = self.finish_reason or ("running" if self._started else "not started")
        return f"<partita.Generation: {'+'.join(map(str, counts))} new tokens, {state}>"

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @property
    def finished(self) -> bool:
        """True once the generation has finished, failed, or been closed."""
        return self.progress.closed or not self.progress.open

    @property
    def text(self) -> str:
        """The text of the first prompt's completion."""
        return self.texts[0]

    @property
    def texts(self) -> tuple[str, ...]:
        """Generated text, one string per prompt."""
        return tuple(ticket.text for ticket in self._tickets())

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """The new tokens of each prompt."""
        return tuple(tuple(ticket.tokens) for ticket in self._tickets())

    @property
    def results(self) -> tuple[CompletionResult, ...]:
        """Text, token ids, finish reason and sampling options of each prompt."""
        return tuple(replace(ticket.result, finish_reason=self.progress.finish(ticket)) for ticket in self._tickets())

    def _tickets(self) -> list[Ticket]:
        """The requests; runs them to their end unless iterated."""
        if not self._started and not self.finished:
            self.run()
        return self.progress.tickets

    @property
    def steps(self) -> list[Step]:
        """The steps so far, as the engine recorded them."""
        return self.progress.steps

    @property
    def timings(self) -> dict[str, Any]:
        """Speed so far, by the names of `generate --json`; None for too few measurements.

        Steps shared with rows of other requests are counted with their tokens.
        """
        return timings(self.progress.steps, min(len(self.progress.tickets), self._slots))

    @property
    def speculation(self) -> SpeculationFigures | None:
        """Figures of speculative decoding so far; None where it is off."""
        return speculation_figures(speculation_fact(self._speculation), [step.fact for step in self.progress.steps])

    @property
    def finish_reason(self) -> FinishReason | None:
        """The most severe finish reason of all prompts, in the order error, interrupted, cache_full, length, stop.

        None while it is running.
        """
        return self.progress.finish_reason


def timings(steps: Sequence[Step], rows: int) -> dict[str, Any]:
    """Speed of a generation, as in the report: profiled steps are left out if there are others.

    `rows`: batch size.
    """
    facts = [step.fact for step in steps]
    prefill, decode = (step_times(facts, phase, rows) for phase in PHASES)
    return {
        "prompt_tokens": sum(step.row_tokens for step in steps if step.phase == "prefill" and not step.is_repeated),
        "prefill_seconds": prefill.seconds,
        "prefill_tokens_per_second": prefill.tokens_per_second,
        "first_token_seconds": first_token_seconds(steps),
        "decode_steps": decode.steps,
        "decode_tokens": decode.tokens,
        "decode_tokens_per_second": decode.tokens_per_second,
        "decode_p50_ms": decode.step_p50_ms,
        "overhead_p50_ms": decode.overhead_p50_ms,
    }


def sampling_options(samplings: Sequence[Sampling]) -> dict[str, str]:
    """Sampling options for a report; values that differ are joined by slashes."""
    names = [name for name in samplings[0].figures() if name != "max_new_tokens"]
    columns = {name: [_text(sampling.figures()[name]) for sampling in samplings] for name in names}
    columns["sampling"] = [sampling.source or "" for sampling in samplings]
    found = {name: values[0] if len(set(values)) == 1 else " / ".join(values) for name, values in columns.items()}
    return {name: value for name, value in found.items() if value}


def _text(value: float | str | None) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
