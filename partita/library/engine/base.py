"""The engine protocol of a loaded package, in this process (`LocalEngine`) or in a worker process (`RemoteEngine`)."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from partita.check.requirements import Limits
from partita.errors import GenerationError, PartitaError, UsageError
from partita.library.chain import Target
from partita.library.engine.requests import Listener, Ticket, Work, check_work
from partita.library.run_report import make_report
from partita.observations.facts import RunFacts
from partita.observations.records import ChainEntry, Environment
from partita.options.generation import BatchOptions
from partita.package.folder import Manifest
from partita.partition_reports.records import Report
from partita.partition_reports.records import Request as Asked
from partita.runtime.generate.prefix_file import PrefixContent
from partita.runtime.generate.record import Step
from partita.runtime.generate.text.tokens import Text, TextStream

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


ReportFacts: TypeAlias = tuple[RunFacts, tuple[str, ...], tuple[ChainEntry, ...], Environment, Asked, Limits]
"""Facts of a run, notes on its experiments, its chain, and the other arguments of `make_report`."""


class Engine(ABC):
    """A loaded package and its requests. One thread at a time steps it; any thread may submit and cancel.

    Requests share the rows of the batch, first come, first served. An error of a run ends all requests in the batch; an
    error of one row ends its request.
    """

    opened: OpenedPackage
    in_worker = False
    """Whether the package is in a worker process."""

    def __init__(self, folder: Path, manifest: Manifest, target: Target) -> None:
        self.folder, self.manifest, self.target = folder, manifest, target
        self.chunk = 0
        """Prompt tokens per run of the open batch."""
        self.lost_by: PartitaError | None = None
        """The error of a run that ended requests since `open`."""
        self._text: Text | None = None
        self._probed: tuple[RunFacts, tuple[ChainEntry, ...], tuple[str, ...]] | None = None
        """Facts with the last experiments on nodes that fell back, the chain with the reasons that they found, and
        notes. Experiments are made once."""
        self.restarts: Restarts | None = None
        """For a worker process: how to restart it; None: when it ends, its requests end with an error."""
        self.closed = False
        self._process = os.getpid()
        self._stepping = threading.RLock()
        """Held by the thread that steps or otherwise changes requests."""

    def check_open(self) -> None:
        """Raise GenerationError if it is closed, or in a fork of the process that opened it."""
        if self.closed:
            raise GenerationError(CLOSED)
        self.check_process()

    def check_process(self) -> None:
        """Raise GenerationError in a fork of the process that opened it."""
        if os.getpid() != self._process:
            raise GenerationError(FORKED)

    @property
    def is_running(self) -> bool:
        """False after the worker process ended and could not be restarted."""
        return True

    @property
    def slots(self) -> int:
        """Rows of the batch."""
        return self.opened.slots

    @property
    @abstractmethod
    def running(self) -> int:
        """Number of unfinished requests with a row."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests without a row yet."""

    def use_text(self, text: Text | None) -> None:
        """Set the package's tokenizer, with which later requests get text; None: no text."""
        self._text = text

    @abstractmethod
    def open(self, options: BatchOptions) -> int:
        """Open a batch for requests and begin a new record for `report`, or share the open batch if its options are
        equal; return the prompt tokens per run.

        Raises GenerationError while requests with other options are running, and for a prefix of another package;
        UsageError.
        """

    def submit(
        self, work: Work, listener: Listener | None = None, on_step: Callable[[Step], object] | None = None
    ) -> Ticket:
        """Queue a request.

        `listener` is called with its pieces and `on_step` with its steps, in the thread that steps. Raises
        GenerationError for an invalid prompt and a closed model, UsageError for an invalid option.
        """
        check_work(work, self.folder, self.manifest)
        self.check_open()
        if self._text is None and work.stop:
            raise UsageError("`stop` is text, but there is no tokenizer; pass token ids to stop at")
        ticket = Ticket(work, self._stream(work), listener, on_step, self._cancel)
        self._enqueue(ticket)
        return ticket

    @abstractmethod
    def step(self) -> bool:
        """Run a step, or wait for one of the worker process, and pass requests their pieces. False if no request is
        open.

        Raises exceptions of listeners after all have received their pieces.
        """

    @abstractmethod
    def wait(self, seconds: float | None = None) -> bool:
        """Block until `step` has work, for at most `seconds`; return whether it has."""

    def _stream(self, work: Work) -> TextStream | None:
        """The text of the completion; None if the worker process decodes it, or nothing does."""
        return None

    @abstractmethod
    def _enqueue(self, ticket: Ticket) -> None:
        """Run a request. Called by any thread."""

    @abstractmethod
    def _cancel(self, ticket: Ticket) -> None:
        """End a cancelled request. Called by any thread."""

    @abstractmethod
    def report_facts(self, request: ReportRequest) -> ReportFacts:
        """The data of the report. Steps wait while it is collected, but not while the report is built."""

    def report(self, request: ReportRequest) -> Report:
        """The partition report of the steps since `open`, with the experiments of an earlier report if it has none.

        Raises ReportError without steps.
        """
        facts, notes, chain, environment, asked, limits = self.report_facts(request)
        if facts.probing is not None:
            self._probed = facts, chain, notes
        elif self._probed is not None and _states(self._probed[1]) == _states(chain):
            probed, chain, earlier_notes = self._probed
            providers = {session.file: session.providers for session in probed.sessions}
            sessions = tuple(replace(each, providers=providers[each.file]) for each in facts.sessions)
            facts, notes = replace(facts, sessions=sessions, probing=probed.probing), (*notes, *earlier_notes)
        facts = replace(facts, notes=(*facts.notes, *notes))
        return make_report(self.folder, self.manifest, facts, chain, environment, asked, limits)

    @abstractmethod
    def save_prefix(self, prefix: PrefixContent, file: str, prefill_chunk: int | None = None) -> PrefixSaved:
        """Prefill a prefix, with its adapter, and write its states to a file. No request may be running.

        Raises GenerationError for invalid tokens and for states that cannot be read back, ReportError when the file
        cannot be written.
        """

    def close(self) -> None:
        """End all requests and free the sessions. May be called repeatedly, from any thread; does nothing in a fork."""
        if os.getpid() == self._process:
            self.closed = True
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """End all requests with an error, and free the sessions."""


def _states(chain: Sequence[ChainEntry]) -> list[tuple[str, str]]:
    """The providers of a chain and whether each is used."""
    return [(entry.provider, entry.status) for entry in chain]
