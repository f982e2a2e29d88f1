"""A request from the caller down to the batch: what it asks for, its ticket, the pieces it gets, and its answer."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

from partita.errors import PartitaError, UsageError
from partita.library.edge import ArgumentError
from partita.library.sampling import Sampling
from partita.options.fields import checked
from partita.package import Manifest
from partita.runtime.engine.checks import check_budget, check_prompt
from partita.runtime.logprobs import TokenLogprobs
from partita.runtime.text import TextStream

State = Literal["waiting", "running", "over"]
FinishReason = Literal["stop", "length", "cache_full", "interrupted", "error"]
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Work:
    """What one request asks for."""

    prompt: tuple[int, ...]
    sampling: Sampling
    """Completed."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    stop_ids: tuple[int, ...] = ()
    """Stop tokens."""
    logprobs: int | None = None
    """Pieces have the log-probability of each new token, and those of so many of the likeliest; None: they have not."""
    adapter: str | None = None
    """Name of an adapter of the package; None: the adapter of the batch (`BatchOptions.adapter`)."""
    trial: bool = False
    """A warm-up request, whose adapter reports leave out."""
    stays: bool = False
    """It keeps its row and its cache when it ends, for a next turn, until it is released. Where running rows would
    change the cache of a finished one, the next turn reads everything again.
    """


class Piece(NamedTuple):
    """What a step added to a request. A tuple, because each token makes one."""

    text: str
    """Whole characters only, so often none."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, where they were requested."""
    finish_reason: str | None
    """`stop`, `length`, `cache_full`, `interrupted` or `error` of the last piece; None of the others."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt, complete or not."""

    text: str
    """Without special tokens and what follows a stop string; empty for a package without a tokenizer."""
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason | None
    """None while it goes on."""
    sampling: Sampling
    """With a value for everything: the same gives the same answer."""


@dataclass(slots=True)
class Completion:
    """Tokens and text that one turn of a request has got so far."""

    prompt: tuple[int, ...]
    stream: TextStream | None
    """None without a tokenizer."""
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: str | None = None

    def text(self) -> str:
        """The text so far; empty without a tokenizer."""
        return "".join(self.pieces)

    def take(self, tokens: Sequence[int], finish: str | None) -> tuple[int, ...]:
        """Add the tokens of one step; those that belong to the answer: none after a stop string."""
        if self.finish is not None:
            return ()
        self.finish = finish  # also without a token: logits that are not finite end it with none
        if self.stream is None:
            self.tokens += tokens
            return tuple(tokens)
        taken = []
        for token in tokens:
            taken.append(token)
            self.pieces.append(self.stream.push(token))
            if self.stream.stopped:
                self.finish = "stop"
                break
        self.tokens += taken
        if self.finish is not None:
            self.end()
        return tuple(taken)

    def end(self) -> None:
        """Add the text that was held back: no token follows."""
        if self.stream is not None:
            self.pieces.append(self.stream.finish())
            self.stream = None


class Ticket:
    """A submitted request. The thread that steps the engine changes it; any thread may read it, and cancel it."""

    def __init__(
        self,
        work: Work,
        completion: Completion,
        listener: Listener | None,
        on_step: Callable[[Any], object] | None,
        on_cancel: Callable[[Ticket], object],
    ) -> None:
        """`listener` gets its pieces; `on_step` each `Step` in which it has a row, after the pieces of the step."""
        self.number = next(_NUMBERS)
        self.work, self.sampling, self.completion = work, work.sampling, completion
        self.listener, self.on_step, self._on_cancel = listener, on_step, on_cancel
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
        """Its row of the batch, as long as it has one."""
        self.copied_tokens = 0
        """Prompt tokens of this turn whose cache was copied, from a prefix or from another row, instead of read."""
        self.cancelled = self.released = False
        self._earlier: tuple[int, ...] = ()

    @property
    def answer(self) -> Answer:
        """The answer so far, of this turn."""
        done = self.completion
        reason: Any = done.finish
        return Answer(done.text(), tuple(done.tokens), len(done.prompt), reason, self.sampling)

    @property
    def history(self) -> tuple[int, ...]:
        """All tokens of its row: those of earlier turns, the prompt, and the answer so far."""
        return (*self._earlier, *self.completion.prompt, *self.completion.tokens)

    @property
    def longest(self) -> int:
        """Tokens that its row has at most when this turn is over."""
        return len(self._earlier) + len(self.completion.prompt) + (self.sampling.max_new_tokens or 0)

    def __reduce__(self) -> NoReturn:
        raise ArgumentError("a ticket cannot be pickled or copied; take its answer, which can")

    def cancel(self) -> None:
        """End it, from any thread: after the next step it is over, with `interrupted`. Its row is free then, unless it
        stays. A request that is over is left as it is.
        """
        self.cancelled = True
        self._on_cancel(self)

    def begin_turn(self, history: tuple[int, ...], completion: Completion, sampling: Sampling) -> None:
        """Wait with a new turn after `history`. For the engine."""
        self._earlier, self.completion, self.sampling = history, completion, sampling
        self.state, self.error, self.cancelled, self.copied_tokens = "waiting", None, False, 0
        self.submitted, self.began, self.first_token, self.ended = time.perf_counter(), None, None, None


Listener = Callable[[Ticket, Piece], object]


def weak(method: Callable[[Ticket], object]) -> Callable[[Ticket], object]:
    """A function that calls the method while its object exists: a ticket does not keep its engine open."""
    found = weakref.WeakMethod(method)

    def call(ticket: Ticket) -> None:
        bound = found()
        if bound is not None:
            bound(ticket)

    return call


def check_work(work: object, manifest: Manifest, name: str = "the prompt") -> None:
    """Raise GenerationError for a prompt that the package cannot take, UsageError for an option or another type.

    `name`: how the message calls the prompt.
    """
    if not isinstance(work, Work):
        raise UsageError(
            f"submit() got a {type(work).__name__}; make a request of a prompt with partita.request(model, prompt)"
        )
    vocab_size = manifest.graph.vocab_size
    check_prompt(work.prompt, manifest.graph, name, answered=True)
    check_budget(work.sampling.max_new_tokens or 0)
    checked(work.sampling)
    if work.logprobs is not None and not 0 <= work.logprobs <= vocab_size:
        raise UsageError(
            f"`logprobs` is {work.logprobs}; it must be between 0 and {vocab_size}, the size of the vocabulary"
        )
    names = [record.name for record in manifest.switchable]
    if work.adapter is not None and work.adapter not in names:
        there = f"choose one of {', '.join(names)}, or leave it out" if names else "it has none"
        raise UsageError(f"`adapter={work.adapter}`: the package has no adapter of this name; {there}")


def tell(pieces: Sequence[tuple[Ticket, Piece]]) -> None:
    """Give listeners their pieces. A listener that raises gets no more, and its request is cancelled; the first
    exception is raised once all have theirs.
    """
    wrong: Exception | None = None
    for ticket, piece in pieces:
        if ticket.listener is None:
            continue
        try:
            ticket.listener(ticket, piece)
        except Exception as error:  # noqa: BLE001 - raised below
            wrong, ticket.listener = wrong or error, None
            ticket.cancel()
    if wrong is not None:
        raise wrong
