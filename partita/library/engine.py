"""What a loaded package can be asked, wherever it is: in this process, or in a child that may crash.

Everything that is said to it and that it answers is a plain record, so that it can travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from partita.check.limits import Limits
from partita.library.sampling import Sampling
from partita.library.speculation import NO_SPECULATION, Speculation
from partita.observations.records import ChainEntry
from partita.package_records import Verification
from partita.partition_reports.records import Report
from partita.runtime.engine.recorder import Step
from partita.runtime.evaluation import Evaluation

ANOTHER = (
    "another generation of this model has begun since, and only one runs at a time; load the package again to run two "
    "at once"
)
"""What whoever goes on with an earlier generation is told."""
CLOSED = "this model is closed; load the package again"
FORKED = "this model was loaded before this process was forked, and its threads are not here; load the package here"
"""What whoever goes on with an engine that was closed is told."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What is known of a package once its sessions are open."""

    chain: tuple[ChainEntry, ...]
    """What became of each provider of the chain."""
    idle: tuple[str, ...]
    """Providers of the chain that were assigned no nodes."""
    load_seconds: float


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What one row of the batch is asked for."""

    prompt: tuple[int, ...]
    sampling: Sampling
    """Completed."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end this row, beside those of the generation."""
    logprobs: int | None = None
    """How likely each new token was is told in `Step.logprobs`, with so many of the likeliest; None: it is not."""
    shares: int = 0
    """Tokens of the prompt that others which are to come begin with, too, as far as is known."""
    adapter: str | None = None
    """Name of an adapter of the package for this row; None: that of the generation."""
    trial: bool = False
    """A report does not tell its adapter."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What a generation is asked for."""

    rows: tuple[RowRequest, ...]
    stop_ids: tuple[int, ...] = ()
    prefill_chunk: int | None = None
    """None: the default."""
    adapter: str | None = None
    """Name of an adapter of the package; None: none."""
    prefix: str | None = None
    """File of a prefix that every prompt begins with."""
    one_sampler: bool = True
    """All rows have the same options, and draw from one sequence of random numbers; else each has its own."""
    speculation: Speculation = NO_SPECULATION
    """Who guesses what follows."""

    @property
    def adapters(self) -> tuple[str | None, ...]:
        """The adapter of each row."""
        return tuple(self.adapter if row.adapter is None else row.adapter for row in self.rows)

    @property
    def longest(self) -> int:
        """Length of the longest prompt, in tokens."""
        return max(len(row.prompt) for row in self.rows)

    @property
    def max_new_tokens(self) -> int:
        """The largest of all rows, which bounds the number of decode steps."""
        return max(row.sampling.max_new_tokens or 0 for row in self.rows)


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """A prefix that is to be read, and kept in a file."""

    tokens: tuple[int, ...]
    file: str
    text: str | None = None
    """The text that they are of, which prompts go on with."""
    system: str | None = None
    """The message of the system that they are of."""
    prefill_chunk: int | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class PrefixSaved:
    """What became of it."""

    size_bytes: int
    """Of the file."""
    seconds: float
    """That reading the tokens took."""


@dataclass(frozen=True, slots=True)
class Begun:
    """How a generation is told apart, and the chunks in which its prompt is read."""

    number: int
    """Of the generations of this engine: only the last one can go on."""
    chunk_tokens: int
    """Prompt tokens per run as the package takes them, which is not always as asked."""
    chunk_is_fixed: bool
    """The size of the prefill graph says so."""
    rows: int
    """Of the batch."""
    max_length: int
    """Tokens that a row of the cache holds, prompt and answer together."""
    vocab_size: int
    rows_apart: bool
    """A row can begin while others are at work; else rows begin together, with prompts of equal length."""
    rows_rest: bool
    """A row that has finished keeps what it has in the cache while others are at work."""
    adapters_by_row: bool = False
    """Rows may have adapters of their own; else those with another one take turns with them."""
    adapters: tuple[str, ...] = ()
    """Those that rows can be asked to have."""
    longest: int | None = None
    """What `max_length` can be set to where the package is opened; None where its export has decided it."""
    model_positions: int | None = None
    """Most positions that the model supports; None where that is unknown."""
    alone_beyond: int | None = None
    """The rotary frequencies of a text with more tokens than this are also those of the rows beside it, which would
    have others alone. None: rows make no difference to each other.
    """


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """What a report says of a generation beside the facts of the run."""

    finish_reason: str | None = None
    """None: as the steps have it."""
    finish_detail: str = ""
    complete: bool = True
    """The run ended by itself: the graph as ONNX Runtime runs it is looked at, too."""
    tokenizer_load_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    probe_seconds: float = 0.0


class Engine(Protocol):
    """A loaded package that generates and verifies, in this process or in a child."""

    opened: Opened

    def begin(self, request: GenerateRequest) -> Begun:
        """Begin a generation; one that was going on is over. Raises GenerationError for prompts, UsageError."""

    def open(
        self,
        prefill_chunk: int | None = None,
        adapter: str | None = None,
        speculation: Speculation = NO_SPECULATION,
        prefix: str | None = None,
    ) -> Begun:
        """Begin a generation whose rows are all free, for requests that join and leave; one that was going on is over.

        What goes wrong in a row alone ends that row, with `Step.errors`. `prefix`: file of one that prompts may begin
        with; those that do are not read so far. Raises UsageError, GenerationError for the prefix.
        """

    def join(self, number: int, request: RowRequest) -> int:
        """Give a request a free row of the generation; its index. Raises GenerationError for a bad prompt, when no row
        is free, and where a row cannot begin beside the others; UsageError.
        """

    def leave(self, number: int, row: int) -> None:
        """Free a row, finished or not."""

    def halt(self, number: int, row: int) -> None:
        """End a row where it is: it adds nothing more, and keeps what it has, so that it can be extended."""

    def extend(self, number: int, row: int, tokens: Sequence[int], sampling: Sampling) -> None:
        """Give a row more tokens to read, as a next turn, and go on after them as `sampling` says.

        The row keeps its stop set and what it tells. Raises GenerationError for tokens that it cannot take.
        """

    def rewind(self, number: int, row: int, tokens: int) -> bool:
        """Take a row back by so many of its tokens. False, and nothing done, where its cache cannot go back."""

    def step(self, number: int) -> Step | None:
        """The next step of the generation; None when no row has anything to do. Raises what `runtime.generate` does."""

    def save_prefix(self, request: PrefixRequest) -> PrefixSaved:
        """Read a prefix and write what a row has of it to a file; a generation that was going on is over.

        Raises GenerationError for tokens that the package cannot take and for states that cannot be given out,
        ReportError when the file cannot be written.
        """

    def report(self, request: ReportRequest) -> Report:
        """The report of the last generation. One of `begin` is over then; one of `open` goes on."""

    def verify(self, reference: str | None = None) -> Verification:
        """Replay the package's known answer, or that of `reference`, in sessions of its own."""

    def evaluate(self) -> Evaluation:
        """Measure the quality of the package, in a session of its own."""

    def close(self) -> None:
        """Free the sessions and everything that belongs to them. May be called twice."""
