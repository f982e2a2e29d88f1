"""The engine protocol of a loaded package, in this process (`LocalEngine`) or in a worker process (`RemoteEngine`)."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from partita.check.requirements import Limits
from partita.errors import GenerationError, PartitaError, UsageError
from partita.library.api import ArgumentError
from partita.library.engine.requests import Completion, Listener, Ticket, Work
from partita.library.engine.speculation import NO_SPECULATION, Speculation
from partita.library.sampling import Sampling
from partita.observations.records import ChainEntry
from partita.observations.text_format import plural
from partita.package.folder import Manifest
from partita.package.records import Evaluation, Verification
from partita.partition_reports.records import Report
from partita.runtime.generate.checks import check_budget, check_prompt
from partita.runtime.generate.prefix_file import PrefixContent
from partita.runtime.generate.record.recorder import Step
from partita.runtime.generate.text.tokens import Text

CLOSED = "this model is closed; load the package again"
FORKED = (
    "this model was loaded before this process was forked, and its threads do not exist here; load the "
    "package in this process"
)
BUSY = (
    "requests of this model are running with another prefill_chunk, adapter, prefix or speculation; read them to their "
    "end or close them first, or load the package again"
)


@dataclass(frozen=True, slots=True)
class OpenedPackage:
    """Facts of a package after its sessions were opened."""

    chain: tuple[ChainEntry, ...]
    """State of each provider of the chain."""
    idle_providers: tuple[str, ...]
    """Providers of the chain that were assigned no nodes."""
    load_seconds: float
    slots: int
    """Rows of the batch."""
    notes: tuple[str, ...] = ()
    """Notes on the opening of its graphs."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options that all requests of a batch share."""

    prefill_chunk: int | None = None
    """Prompt tokens per run; None: the default."""
    adapter: str | None = None
    """Adapter of requests that name none."""
    speculation: Speculation = NO_SPECULATION
    prefix: str | None = None
    """Prefix file. Its tokens are not prefilled again in prompts that begin with them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens per run."""

    tokens: int
    """The number that the package supports."""
    is_fixed: bool
    """The prefill graph has this fixed size."""


@dataclass(frozen=True, slots=True)
class PrefixSaved:
    """A saved prefix."""

    tokens: int
    size_bytes: int
    """Size of the file in bytes."""
    seconds: float
    """Seconds of the runs that computed it."""


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """Report fields besides the facts of the run."""

    finish_reason: str | None = None
    """Finish reason; None: that of the steps."""
    finish_detail: str = ""
    complete: bool = True
    """Also read the optimised graph of ONNX Runtime."""
    tokenizer_load_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    probe_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Restarts:
    """How a server restarts an engine's worker process after its end."""

    notify: Callable[[str], object]
    """Called with a message for the operator."""
    check: Callable[[], object]
    """Called when the package is loaded again and no request is running; raises a PartitaError to reject it."""


class ThisProcess:
    """The process id without a system call at each step."""

    id = os.getpid()

    @classmethod
    def update(cls) -> None:
        """Set the id in a new fork."""
        cls.id = os.getpid()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=ThisProcess.update)


class Engine(ABC):
    """A loaded package and its requests. One thread at a time steps it; any thread may submit and cancel.

    Requests share the rows of the batch, first come, first served. An error of a run ends all requests in the batch; an
    error of one row ends its request.
    """

    folder: Path
    opened: OpenedPackage

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.chunk = Chunk(0, is_fixed=False)
        """Prompt tokens per run of the open batch."""
        self.lost_by: PartitaError | None = None
        """The error of a run that ended requests since `open`."""
        self.copied_tokens = 0
        """Total prompt tokens copied from a prefix or another row instead of prefilled."""
        self.restarts: Restarts | None = None
        """For a worker process: how to restart it; None: when it ends, its requests end with an error."""
        self._closed = False
        self._process = ThisProcess.id
        self._stepping = threading.RLock()
        """Held by the thread that steps or otherwise changes requests."""

    def __reduce__(self) -> NoReturn:
        raise ArgumentError("a scheduler cannot be pickled or copied; load the package in the other process")

    def _check_open(self) -> None:
        """Raise GenerationError if it is closed, or in a fork of the process that opened it."""
        if self._closed:
            raise GenerationError(CLOSED)
        if ThisProcess.id != self._process:
            raise GenerationError(FORKED)

    @property
    def is_running(self) -> bool:
        """False after the worker process ended and could not be restarted."""
        return True

    @property
    @abstractmethod
    def slots(self) -> int:
        """Rows of the batch."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Number of unfinished requests with a row."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests without a row yet."""

    @abstractmethod
    def use_text(self, text: Text | None) -> None:
        """Set the package's tokenizer, with which later requests get text; None: no text."""

    @abstractmethod
    def open(self, options: BatchOptions, *, longest: int | None = None, takes_turns: bool = True) -> Chunk:
        """Open a batch for requests and begin a new record for `report`, or share the open batch if its options are
        equal.

        `longest`: tokens of the longest prompt, if known. `takes_turns`: requests come and go; False for the prompts of
        one call. Raises GenerationError while requests with other options are running, and for a prefix of another
        package; UsageError.
        """

    @abstractmethod
    def submit(
        self, work: Work, listener: Listener | None = None, on_step: Callable[[Step], object] | None = None
    ) -> Ticket:
        """Queue a request.

        `listener` is called with its pieces and `on_step` with its steps, in the thread that steps. Raises
        GenerationError for an invalid prompt, UsageError for an invalid option.
        """

    @abstractmethod
    def step(self) -> bool:
        """Run a step, or wait for one of the worker process, and pass requests their pieces. False if no request is
        open.

        Raises exceptions of listeners after all have received their pieces.
        """

    @abstractmethod
    def wait(self, seconds: float | None = None) -> bool:
        """Block until `step` has work, for at most `seconds`; return whether it has."""

    def retry(self) -> None:  # noqa: B027 - an engine in this process has nothing to start
        """Try again to restart a worker process, if there is one and the last attempt is long enough ago."""

    @abstractmethod
    def extend(self, ticket: Ticket, tokens: Sequence[int], sampling: Sampling) -> None:
        """Begin the next turn of a kept request: run `tokens` after its history, then generate with `sampling`.

        Raises GenerationError for invalid tokens, UsageError.
        """

    @abstractmethod
    def rewind(self, ticket: Ticket, tokens: int) -> bool:
        """Remove the last `tokens` of a kept request's history.

        False if its cache cannot be rewound; then the next turn prefills the rest again. Raises GenerationError if no
        token remains.
        """

    @abstractmethod
    def release(self, ticket: Ticket) -> None:
        """Free the row of a kept request that has finished."""

    @abstractmethod
    def report(self, request: ReportRequest) -> Report:
        """The partition report of the steps since `open`. Raises ReportError without steps."""

    @abstractmethod
    def verify(self, reference: str | None = None) -> Verification:
        """Replay the package's reference logits, or those of `reference`, in separate sessions."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Measure the quality of the package in a separate session."""

    @abstractmethod
    def save_prefix(self, prefix: PrefixContent, file: str, prefill_chunk: int | None = None) -> PrefixSaved:
        """Prefill a prefix, with its adapter, and write its states to a file. No request may be running.

        Raises GenerationError for invalid tokens and for states that cannot be read back, ReportError when the file
        cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """End all requests and free the sessions. May be called repeatedly, from any thread."""


def at_rest(ticket: Ticket) -> tuple[int, ...]:
    """The history of a kept request that has finished. Raises GenerationError for others."""
    if ticket.state != "finished" or not ticket.work.keep_row or ticket.released:
        raise GenerationError("cannot continue: the request is still running, was not kept, or was released")
    return ticket.history


def check_turn(ticket: Ticket, tokens: tuple[int, ...], sampling: Sampling, manifest: Manifest) -> tuple[int, ...]:
    """The whole text of a next turn: history and `tokens`. Raises GenerationError for invalid tokens."""
    history = at_rest(ticket)
    check_budget(sampling.max_new_tokens or 0)
    check_prompt(tokens, manifest.graph, "the next turn")
    whole = (*history, *tokens)
    check_prompt(whole, manifest.graph, "history and next turn together", answered=True)
    return whole


def check_rewind(ticket: Ticket, tokens: int) -> tuple[int, ...]:
    """The history of a request that can be rewound by `tokens`. Raises GenerationError for others."""
    history = at_rest(ticket)
    if not 0 < tokens < len(history):
        raise GenerationError(f"a history of {plural(len(history), 'token')} cannot be rewound by {tokens}")
    return history


def completion_of(text: Text | None, work: Work, prompt: tuple[int, ...], before: tuple[int, ...]) -> Completion:
    """The completion of a new turn. `before`: all tokens before the answer.

    Raises UsageError for stop strings without a tokenizer.
    """
    if text is None:
        if work.stop:
            raise UsageError("`stop` is text, but there is no tokenizer; pass token ids to stop at")
        return Completion(prompt, None)
    return Completion(prompt, text.stream(before, work.stop, work.stop_ids))
