"""What a loaded package does, in this process (`LocalEngine`) or in a worker process (`RemoteEngine`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

from partita.check.limits import Limits
from partita.errors import GenerationError, PartitaError, UsageError
from partita.library.edge import ArgumentError
from partita.library.engine.requests import Completion, Listener, Ticket, Work
from partita.library.engine.speculation import NO_SPECULATION, Speculation
from partita.library.sampling import Sampling
from partita.observations.records import ChainEntry
from partita.observations.text_format import plural
from partita.package.folder import Manifest
from partita.package.records import Evaluation, Verification
from partita.partition_reports.records import Report
from partita.runtime.generate.checks import check_budget, check_prompt
from partita.runtime.generate.record.recorder import Step
from partita.runtime.generate.text.tokens import Text

CLOSED = "this model is closed; load the package again"
FORKED = "this model was loaded before this process was forked, and its threads are not here; load the package here"
BUSY = (
    "requests of this model are running with another prefill_chunk, adapter, prefix or speculation; read them to their "
    "end or close them first, or load the package again"
)


@dataclass(frozen=True, slots=True)
class Opened:
    """What is known of a package once its sessions are open."""

    chain: tuple[ChainEntry, ...]
    """What became of each provider of the chain."""
    idle: tuple[str, ...]
    """Providers of the chain that were assigned no nodes."""
    load_seconds: float
    slots: int
    """Rows of the batch."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options that requests which share a batch have in common."""

    prefill_chunk: int | None = None
    """Prompt tokens per run; None: the default."""
    adapter: str | None = None
    """Name of the adapter of requests that name none."""
    speculation: Speculation = NO_SPECULATION
    prefix: str | None = None
    """File of a prefix. Prompts that begin with its tokens do not read them again."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens per run."""

    tokens: int
    """As the package takes them."""
    is_fixed: bool
    """The prefill graph has this size."""


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """A prefix that is to be read and saved."""

    tokens: tuple[int, ...]
    file: str
    text: str | None = None
    """The text of the tokens."""
    system: str | None = None
    """The system message of the tokens."""
    prefill_chunk: int | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class PrefixSaved:
    """A prefix that was saved."""

    tokens: int
    size_bytes: int
    """Of the file."""
    seconds: float
    """Time of the runs that read the tokens."""


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """What a report says beside the facts of the run."""

    finish_reason: str | None = None
    """None: that of the steps."""
    finish_detail: str = ""
    complete: bool = True
    """Also read the graph as ONNX Runtime runs it."""
    tokenizer_load_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    probe_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Restarts:
    """Start the worker process of an engine again when it has ended, for a server."""

    tell: Callable[[str], object]
    """Gets a line for the operator."""
    check: Callable[[], object]
    """Is called with the package loaded again and no request running; refuses it by raising a PartitaError."""


class Engine(Protocol):
    """A loaded package and its requests. One thread steps it, or several take turns; any thread may submit and cancel.

    Requests share the rows of the batch, first come, first served. An error of a run ends all requests in the batch;
    an error of one row ends its request.
    """

    folder: Path
    manifest: Manifest
    opened: Opened
    chunk: Chunk
    """Prompt tokens per run of the open batch."""
    lost_by: PartitaError | None
    """The error of a run that ended requests since `open`."""

    copied_tokens: int
    """Prompt tokens so far whose cache was copied, from a prefix or from another row, instead of read."""
    restarts: Restarts | None
    """Where the engine is a worker process: what to do when it ends; None: its requests end with an error."""

    @property
    def up(self) -> bool:
        """False after the worker process ended and could not be started again."""

    @property
    def slots(self) -> int:
        """Rows of the batch."""

    @property
    def running(self) -> int:
        """Requests that have a row and are not over."""

    @property
    def waiting(self) -> int:
        """Requests that have no row yet."""

    def use_text(self, text: Text | None) -> None:
        """Have requests from now on get text, by this tokenizer of the package; None: none."""

    def open(self, options: BatchOptions, *, longest: int | None = None, takes_turns: bool = True) -> Chunk:
        """Open a batch for requests, and begin a new record for `report`; share the open one where requests are
        running, with these options.

        `longest`: tokens of the longest prompt, where it is known. `takes_turns`: requests come and go; False for the
        prompts of one call. Raises GenerationError while requests with other options are running, and for a prefix
        that is not of this package; UsageError.
        """

    def submit(
        self, work: Work, listener: Listener | None = None, on_step: Callable[[Step], object] | None = None
    ) -> Ticket:
        """Queue a request. `listener` gets its pieces, and `on_step` the steps in which it has a row, from the thread
        that steps. Raises GenerationError for a prompt that the package cannot take, UsageError for an option.
        """

    def step(self) -> bool:
        """Make a step, or wait for the worker process to make one, and give requests their pieces. False when no
        request is open. Raises what a listener raises, once all have their pieces.
        """

    def wait(self, seconds: float | None = None) -> bool:
        """Block until `step` has something to do, at most so long; whether it has."""

    def retry(self) -> None:
        """Start a worker process that could not be started again once more, if the last attempt is some time ago."""

    def extend(self, ticket: Ticket, tokens: Sequence[int], sampling: Sampling) -> None:
        """Begin the next turn of a request that stays: read `tokens` after its history, then answer as `sampling` says.

        Raises GenerationError for tokens that it cannot take, UsageError.
        """

    def rewind(self, ticket: Ticket, tokens: int) -> bool:
        """Remove so many tokens from the end of the history of a request that stays. False where its cache cannot go
        back: the next turn reads it again then. Raises GenerationError unless a token is left.
        """

    def release(self, ticket: Ticket) -> None:
        """Free the row of a request that stays and is over."""

    def report(self, request: ReportRequest) -> Report:
        """The partition report of the steps since `open`. Raises ReportError when there are none."""

    def verify(self, reference: str | None = None) -> Verification:
        """Replay the package's known answer, or that of `reference`, in sessions of its own."""

    def evaluate(self) -> Evaluation:
        """Measure the quality of the package, in a session of its own."""

    def save_prefix(self, request: PrefixRequest) -> PrefixSaved:
        """Read a prefix and write its state to a file. Nothing may be running.

        Raises GenerationError for tokens that the package cannot take and for states that cannot be read back,
        ReportError when the file cannot be written.
        """

    def close(self) -> None:
        """End all requests and free the sessions. May be called twice, and from any thread."""


class EngineState:
    """State and checks that engines have in common."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.chunk = Chunk(0, is_fixed=False)
        self.lost_by: PartitaError | None = None
        self.restarts: Restarts | None = None
        self.copied_tokens = 0
        self._closed = False
        self._process = os.getpid()
        self._stepping = threading.RLock()
        """Held by the thread that steps, or changes requests otherwise."""

    @property
    def up(self) -> bool:
        """Always, without a worker process."""
        return True

    def retry(self) -> None:
        """Nothing, without a worker process."""

    def __reduce__(self) -> NoReturn:
        raise ArgumentError("a scheduler cannot be pickled or copied; load the package there, too")

    def _check_open(self) -> None:
        """Raise GenerationError once it is closed, and in a fork of the process that opened it."""
        if self._closed:
            raise GenerationError(CLOSED)
        if os.getpid() != self._process:
            raise GenerationError(FORKED)


def at_rest(ticket: Ticket) -> tuple[int, ...]:
    """The history of a request that stays and is over. Raises GenerationError for another."""
    if ticket.state != "over" or not ticket.work.stays or ticket.released:
        raise GenerationError("this request cannot continue: it is not over, does not stay, or was released")
    return ticket.history


def check_turn(ticket: Ticket, tokens: tuple[int, ...], sampling: Sampling, manifest: Manifest) -> tuple[int, ...]:
    """The whole text of a next turn: history and `tokens`. Raises GenerationError for tokens that it cannot take."""
    history = at_rest(ticket)
    check_budget(sampling.max_new_tokens or 0)
    check_prompt(tokens, manifest.graph, "what follows")
    whole = (*history, *tokens)
    check_prompt(whole, manifest.graph, "what was said and what follows, together,", answered=True)
    return whole


def check_rewind(ticket: Ticket, tokens: int) -> tuple[int, ...]:
    """The history of a request that can be rewound by so many tokens. Raises GenerationError for another."""
    history = at_rest(ticket)
    if not 0 < tokens < len(history):
        raise GenerationError(f"a history of {plural(len(history), 'token')} cannot go back by {tokens}")
    return history


def completion_of(text: Text | None, work: Work, prompt: tuple[int, ...], before: tuple[int, ...]) -> Completion:
    """The completion of a turn that begins. `before`: all tokens before the answer. Raises UsageError for stop strings
    without a tokenizer.
    """
    if text is None:
        if work.stop:
            raise UsageError("`stop` is a text, and there is no tokenizer; give token ids to stop at")
        return Completion(prompt, None)
    return Completion(prompt, text.stream(before, work.stop, work.stop_ids))
