"""What the scheduler is asked, and what becomes of it: work, the ticket that is given for it, and its pieces."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn, cast

from partita.errors import PartitaError, UsageError
from partita.library.edge import ArgumentError
from partita.library.engine import Begun
from partita.library.generation import Answer, FinishReason, Row
from partita.library.sampling import Sampling
from partita.options import checked
from partita.runtime.engine.checks import check_budget, check_prompt
from partita.runtime.logprobs import TokenLogprobs
from partita.spelling import spelled

State = Literal["waiting", "running", "over"]
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Work:
    """What one request asks for."""

    prompt: tuple[int, ...]
    sampling: Sampling
    """Completed."""
    stop: tuple[str, ...] = ()
    """Texts to stop at."""
    stop_ids: tuple[int, ...] = ()
    """Tokens to stop at."""
    logprobs: int | None = None
    """How likely each new token was is told, with so many of the likeliest; None: it is not."""
    adapter: str | None = None
    """Name of an adapter of the package; None: that of the scheduler."""
    trial: bool = False
    """Nobody asked for it: it shows that its adapter can be read, and is not told in reports."""
    stays: bool = False
    """It keeps its row and its cache when it ends, for a next turn, until it is released. Where a row at rest would
    lose what it has to those at work, a next turn reads everything anew.
    """


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to a request."""

    text: str
    """Whole characters only, so often none."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, where they were asked for."""
    finish_reason: str | None
    """`stop`, `length`, `cache_full`, `interrupted` or `error` of the last piece; None of the others."""


class Ticket:
    """A request that was taken. The thread that steps the scheduler changes it; any thread may look, and cancel it."""

    def __init__(self, work: Work, said: Row, listener: Listener | None, wake: Callable[[], None]) -> None:
        """`said`: what it has said in this turn. `wake` is called when it is cancelled."""
        self.number = next(_NUMBERS)
        self.work, self.sampling, self.said, self.listener = work, work.sampling, said, listener
        self.state: State = "waiting"
        self.error: PartitaError | None = None
        """What ended it, with finish reason `error`."""
        self.submitted = time.perf_counter()
        """These four are seconds of `time.perf_counter`; of this turn, where it has several."""
        self.began: float | None = None
        """It was given a row."""
        self.first_token: float | None = None
        self.ended: float | None = None
        self.row: int | None = None
        """Of the batch, as long as it has one."""
        self.copied_tokens = 0
        """Tokens of this turn that it copied, from a prefix or from another row, and did not read."""
        self.cancelled = self.released = False
        self._wake = wake
        self._earlier: tuple[int, ...] = ()

    @property
    def answer(self) -> Answer:
        """What it has been answered so far, in this turn."""
        said = self.said
        reason = cast("FinishReason | None", said.finish)
        return Answer(said.text(), tuple(said.tokens), len(said.prompt), reason, self.sampling)

    @property
    def history(self) -> tuple[int, ...]:
        """All tokens of its row: those of earlier turns, the prompt, and the answer so far."""
        return (*self._earlier, *self.said.prompt, *self.said.tokens)

    @property
    def longest(self) -> int:
        """Tokens that its row has at most when this turn is over."""
        return len(self._earlier) + len(self.said.prompt) + (self.sampling.max_new_tokens or 0)

    def __reduce__(self) -> NoReturn:
        raise ArgumentError("a ticket cannot be pickled or copied; take its answer, which can")

    def cancel(self) -> None:
        """End it, from any thread: after the next step it is over, with `interrupted`. Its row is free then, unless it
        stays. One that is over already stays as it is.
        """
        self.cancelled = True
        self._wake()

    def begin_turn(self, history: tuple[int, ...], said: Row, sampling: Sampling) -> None:
        """A turn after `history`, of which nothing has been said yet, and which waits. For the scheduler."""
        self._earlier, self.said, self.sampling = history, said, sampling
        self.state, self.error, self.cancelled, self.copied_tokens = "waiting", None, False, 0
        self.submitted, self.began, self.first_token, self.ended = time.perf_counter(), None, None, None


Listener = Callable[[Ticket, Piece], object]


def check_work(work: object, limits: Begun) -> None:
    """Raise GenerationError for a prompt that a batch cannot take, UsageError for an option or what is no work."""
    if not isinstance(work, Work):
        raise UsageError(
            f"submit() got a {type(work).__name__}; make a request of a prompt with partita.request(model, prompt)"
        )
    check_prompt(work.prompt, limits, "the prompt", answered=True)
    check_budget(work.sampling.max_new_tokens or 0)
    checked(work.sampling)
    if work.logprobs is not None and not 0 <= work.logprobs <= limits.vocab_size:
        raise UsageError(
            f"{spelled('logprobs')} is {work.logprobs}; it must be between 0 and {limits.vocab_size}, the size of "
            "the vocabulary"
        )
    if work.adapter is not None and work.adapter not in limits.adapters:
        there = f"choose one of {', '.join(limits.adapters)}, or leave it out" if limits.adapters else "it has none"
        raise UsageError(f"{spelled('adapter', work.adapter)}: the package has no adapter of this name; {there}")
