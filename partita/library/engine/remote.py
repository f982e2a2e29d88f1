"""A loaded package in a worker process, because a provider's native code may crash.

The worker has sessions, loop and scheduler, and sends the pieces of its steps; the parent only sends requests.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Condition, Lock, get_ident
from typing import Any

from partita.errors import GenerationError, PartitaError, ProviderError
from partita.foreign.folder import NO_CHOICE, Choice
from partita.library.api import QUIET, Audience
from partita.library.chain import Target
from partita.library.engine.base import CLOSED, Engine, OpenedPackage, PrefixSaved, ReportFacts, ReportRequest, Restarts
from partita.library.engine.jobs import CRASHES, AudienceEvents, crash_error, foreign
from partita.library.engine.requests import NO_OUTPUT, RequestOutput, Ticket, notify_listeners
from partita.library.engine.worker_loop import Update
from partita.options.generation import BatchOptions
from partita.package.folder import Manifest
from partita.partition_reports.records import Report
from partita.remedies import Remedy
from partita.runtime.generate.prefix_file import PrefixContent
from partita.runtime.generate.record import Step
from partita.runtime.worker.parent import Worker, WorkerLostError

PROCESS = "partita.library.engine.worker_loop"
RETRY_SECONDS = 5.0
"""Minimum seconds between two attempts to restart a worker process."""
DURING = {"report_facts": "the report", "save_prefix": "reading a prefix"}
LOAD_AGAIN = Remedy("load the package again")
WITHOUT = Remedy("remove {provider} from the chain")


class RemoteEngine(Engine):
    """A loaded package in a worker process; see `Engine`."""

    in_worker = True

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        target: Target,
        choice: Choice = NO_CHOICE,
        *,
        observe: bool = True,
        refusal_seconds: float,
        audience: Audience = QUIET,
        with_text: bool = True,
        load_timeout: float | None = None,
    ) -> None:
        """Start the worker and open the package in it.

        `with_text`: load the tokenizer there. `load_timeout`: seconds for loading; None: no limit. Raises the errors of
        `LocalEngine`, and ProviderError when the worker ends, as every method does.
        """
        super().__init__(folder, manifest, target)
        self._load = folder, target, choice
        self._load_options = {
            "observe": observe,
            "refusal_seconds": refusal_seconds,
            "text": with_text and manifest.tokenizer != "none",
            "timeout": load_timeout,
        }
        self._inbox = _Inbox(audience)
        self._sending = Lock()
        """Held while a request is recorded and sent."""
        self._restarting: int | None = None
        """The thread that restarts the worker."""
        self._requests: dict[int, Ticket] = {}
        """Unfinished requests."""
        self._opening = BatchOptions()
        self._reported: Report | None = None
        """The last report since `open`."""
        self._failed: tuple[PartitaError, float] | None = None
        """Error and time of the last failed restart."""
        self._worker_error: PartitaError | None = None
        """How the worker ended."""
        self._start()

    def _start(self) -> None:
        self._inbox.events.clear()
        self._worker = Worker(PROCESS, on_event=self._inbox.put, on_lost=self._inbox.put)
        self._closing = weakref.finalize(self, self._worker.close)
        try:
            self.opened: OpenedPackage = self._worker.call("load", *self._load, **self._load_options)
        except BaseException as error:
            self._worker.kill()
            self._inbox.events.clear()
            if isinstance(error, WorkerLostError) and not error.closed:
                raise crash_error(error, self.target.chain) from error
            raise
        self._worker_error = None

    @property
    def running(self) -> int:
        """Number of unfinished requests with a row."""
        return sum(ticket.state == "running" for ticket in list(self._requests.values()))

    @property
    def waiting(self) -> int:
        """Number of requests without a row yet."""
        return sum(ticket.state == "waiting" for ticket in list(self._requests.values()))

    @property
    def is_running(self) -> bool:
        """False after the worker ended and could not be restarted."""
        return self._failed is None

    @property
    def process_id(self) -> int:
        """Process id of the worker."""
        return self._worker.process.pid

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(self, options: BatchOptions) -> int:
        """Open a batch, or share the open one; see `Engine.open`."""
        with self._stepping:
            self._opening = options
            self.chunk = self._call("open", options)
            self.lost_by = self._reported = None
            return self.chunk

    def _enqueue(self, ticket: Ticket) -> None:
        with self._sending:
            if self._worker_error is not None and self.restarts is None:
                raise self._ended_error()
            self._requests[ticket.number] = ticket
            if self._worker_error is None and self._restarting in (None, get_ident()):
                self._send(ticket)

    def step(self) -> bool:
        """Process the next updates of the worker, and pass requests their pieces. False if no request is open."""
        self.check_process()
        with self._stepping:
            events, failed = self._inbox.events, self._failed
            if events or (self._worker_error is None and self._requests):
                self._handle(self._inbox.get())
                for _ in range(len(events)):
                    self._handle(events.popleft())
            elif self._worker_error is None:
                return False
            elif self._restarting is not None:
                raise self._ended_error()
            elif self.restarts is not None and (failed is None or time.monotonic() - failed[1] >= RETRY_SECONDS):
                # Also without a request: a load balancer sends none to a server that is down.
                self._restart(self.restarts)
            elif self._requests:
                self._end([*self._requests.values()], self._ended_error() if failed is None else failed[0])
            else:
                return False
            return True

    def wait(self, seconds: float | None = None) -> bool:
        """Block until `step` has work, for at most `seconds`; return whether it has."""
        return self._inbox.wait(seconds)

    # --- the package --------------------------------------------------------------------------------------------------

    def report_facts(self, request: ReportRequest) -> ReportFacts:
        """The data of the report, from the worker."""
        found: ReportFacts = self._call("report_facts", request)
        return found

    def report(self, request: ReportRequest) -> Report:
        """The partition report of the steps since `open`; if the worker has ended, the last report."""
        if self._worker_error is None or self._reported is None:
            self._reported = super().report(request)
        return self._reported

    def save_prefix(self, prefix: PrefixContent, file: str, prefill_chunk: int | None = None) -> PrefixSaved:
        """Prefill a prefix in the worker and write its states to a file."""
        saved: PrefixSaved = self._call("save_prefix", prefix, file, prefill_chunk)
        return saved

    def abort(self, how: str) -> None:
        """Kill the worker; its requests end with an error that contains `how`, e.g. `was interrupted`."""
        self._worker.kill(how)

    def _close(self) -> None:
        self._closing()
        with self._stepping:
            self.lost_by = GenerationError(CLOSED)
            self._end([*self._requests.values()], self.lost_by)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _send(self, ticket: Ticket) -> None:
        with suppress(WorkerLostError):  # `step` handles the event
            self._worker.send("submit", ticket.number, ticket.work, self._text is not None, ticket.on_step is not None)

    def _cancel(self, ticket: Ticket) -> None:
        with suppress(PartitaError):  # the worker has ended, and with it the request
            self._worker.send("cancel", ticket.number)

    def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call a verb of the worker. The first Ctrl-C is passed on to it. Raises ProviderError when it ends."""
        self.check_open()
        if self._worker_error is not None:
            raise self._ended_error()
        try:
            return self._worker.wait(self._worker.submit(verb, *args, **kwargs), patient=True)
        except WorkerLostError as lost:
            if self.closed or lost.closed:
                raise GenerationError(CLOSED) from lost
            self._worker_error = self._worker_error or self._death(lost, DURING.get(verb, "generation"))
            raise self._worker_error from lost

    def _handle(self, event: Update | WorkerLostError) -> None:
        """Apply an update. After the worker's end, end running requests; all requests if it is not restarted."""
        if isinstance(event, WorkerLostError):
            if not self.closed:
                self._worker_error = self._worker_error or self._death(event, "generation")
            self.lost_by = error = GenerationError(CLOSED) if self.closed else self._worker_error or event
            stays = self.restarts is not None and not self.closed
            self._end([each for each in self._requests.values() if not stays or each.state == "running"], error)
            return
        requests, (changes, started, step, lost_by) = self._requests, event
        for number, began in started:
            if number in requests:
                requests[number].state, requests[number].began = "running", began
        observers = dict[Callable[[Step], object] | None, None]()
        if step is not None:
            observers = dict.fromkeys(ticket.on_step for ticket in requests.values() if ticket.state == "running")
        self.lost_by = lost_by or self.lost_by
        pieces = []
        for number, text, tokens, logprobs, finish, end in changes:
            ticket = requests.get(number)
            if ticket is None:
                continue
            failure, ended = None, None
            if end is not None:
                failure, ended, ticket.copied_tokens = end
                del requests[number]
            pieces.append((ticket, ticket.add(RequestOutput(text, tokens, logprobs, finish), failure, ended)))
        try:
            notify_listeners(pieces)
        finally:
            for on_step in observers:
                if on_step is not None and step is not None:
                    on_step(Step._make(step))

    def _ended_error(self) -> ProviderError:
        """The error for a worker that has already ended."""
        assert self._worker_error is not None
        return ProviderError(self._worker_error.message, remedy=LOAD_AGAIN)

    def _death(self, lost: WorkerLostError, during: str) -> ProviderError:
        """The error for a worker that ended during an operation."""
        ended = "crashed" if lost.signal in CRASHES else "ended"
        others = foreign(self.target.chain)
        otherwise = WITHOUT.filled(provider=" or ".join(others)) if others else None
        names = ",".join(provider.ort_name for provider in self.target.chain)
        return ProviderError(
            f"{names}: the worker process {ended} during {during}: it {lost.summary}",
            remedy=replace(LOAD_AGAIN, alternative=otherwise),
        )

    def _restart(self, restarts: Restarts) -> None:
        """Restart the worker, check it, and send it the waiting requests. If that fails, `step` ends them."""
        failed = self._failed
        if failed is None:
            restarts.notify(f"{self._worker_error}; it is being restarted")
        with self._sending:
            self._restarting = get_ident()
        try:
            self._closing.detach()
            self._worker.kill()
            self._start()
            self.open(self._opening)
            restarts.check()
            self.open(self._opening)  # a new record for reports
            self._failed = None
        except Exception as raised:  # noqa: BLE001 - the server stays up and retries
            error = raised if isinstance(raised, PartitaError) else PartitaError(f"internal error: {raised!r}")
            self._worker_error = self._worker_error or error
            message = f"{error.message}; retrying every {RETRY_SECONDS:g} s"
            self._failed = ProviderError(message, path=error.path), time.monotonic()
            if failed is None or failed[0].message != message:  # otherwise it would be a line every few seconds
                restarts.notify(f"not loaded: {self._failed[0]}")
        with self._sending:
            self._restarting = None
            for ticket in self._requests.values() if self._failed is None else ():
                self._send(ticket)
                if ticket.cancelled:
                    self._cancel(ticket)
        if self._failed is None and failed is not None:
            restarts.notify("it is loaded again and accepts requests")

    def _end(self, tickets: Sequence[Ticket], error: PartitaError) -> None:
        """End requests with an error."""
        for ticket in tickets:
            self._requests.pop(ticket.number, None)
        ended = NO_OUTPUT._replace(finish_reason="error")
        notify_listeners([(ticket, ticket.add(ended, error)) for ticket in tickets])


class _Inbox:
    """Events of the worker, for the thread that steps. Has no reference to the engine, so that it can be collected."""

    def __init__(self, audience: Audience) -> None:
        self._audience = AudienceEvents(audience)
        self.events: deque[Update | WorkerLostError] = deque()
        self._changed = Condition()

    def put(self, event: Any) -> None:
        """Add the events of a message; called by the thread that reads the worker's messages."""
        if isinstance(event, WorkerLostError):
            self._audience.end()
            event = [event]
        elif isinstance(event, tuple):
            self._audience(event)
            return
        with self._changed:
            self.events.extend(event)
            self._changed.notify()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until there is an event, for at most `seconds`; return whether there is one."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.events, seconds))

    def get(self) -> Update | WorkerLostError:
        """The next event."""
        if not self.events:
            self.wait()
        return self.events.popleft()
