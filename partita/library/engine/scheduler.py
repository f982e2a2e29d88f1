"""Schedules the requests of one package: first come, first served; a free row is given to the next request at once.

One thread steps at a time; any thread may submit and cancel. An error of one row, or in decoding its text, ends its
request. An error of a run ends every request in the batch, and waiting requests begin in a new batch. A listener that
raises ends only its own request.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from partita.errors import GenerationError, PackageError, PartitaError, UsageError, out_of_memory
from partita.library.chain import Target
from partita.library.engine.base import BUSY, CLOSED, Engine
from partita.library.engine.requests import RequestOutput, Ticket, Work, notify_listeners
from partita.options.generation import BatchOptions
from partita.package.folder import Manifest
from partita.runtime.generate.choice.sampling import RecordingSampler, make_sampler
from partita.runtime.generate.loop import PREFILL_CHUNK_TOKENS, GenerationLoop
from partita.runtime.generate.record import Step
from partita.runtime.generate.request import Request
from partita.runtime.generate.runner import Runner
from partita.runtime.generate.text.tokens import TextStream


def chunk_tokens(options: BatchOptions) -> int:
    """Prompt tokens per run."""
    return PREFILL_CHUNK_TOKENS if options.prefill_chunk is None else options.prefill_chunk


class Scheduler(Engine, ABC):
    """The requests of a loaded package, and their steps. See `Engine` for the methods."""

    def __init__(self, folder: Path, manifest: Manifest, target: Target, runner: Runner) -> None:
        super().__init__(folder, manifest, target)
        self.runner = runner
        self._exclusive_length = (runner.contract.recompute_above or 0) if runner.has_rope_length else None
        """Text length above which a row changes the rotary frequencies of other rows. None: rows are independent."""
        self._options = BatchOptions()
        self._loop: GenerationLoop | None = None
        """None before the first batch, or after an error of a run; the next request opens another."""
        self._rows: list[Ticket | None] = [None] * runner.rows
        """Running requests."""
        self._queue: deque[Ticket] = deque()
        self._changed = threading.Condition()
        """Guards the queue."""
        self._has_cancelled = False
        """Whether a request was cancelled since the last step."""

    @abstractmethod
    def _open_batch(self, options: BatchOptions) -> GenerationLoop:
        """A batch with free rows, and a new record for reports. Raises GenerationError, UsageError, PackageError."""

    @property
    def running(self) -> int:
        """Number of unfinished requests with a row."""
        return len(self._rows) - self._rows.count(None)

    @property
    def waiting(self) -> int:
        """Number of requests without a row yet."""
        return len(self._queue)

    # --- any thread ---------------------------------------------------------------------------------------------------

    def _stream(self, work: Work) -> TextStream | None:
        return None if self._text is None else self._text.stream(work.prompt, work.stop, work.stop_ids)

    def _enqueue(self, ticket: Ticket) -> None:
        with self._changed:
            self.check_open()
            self._queue.append(ticket)
            self._changed.notify_all()

    def _cancel(self, ticket: Ticket) -> None:
        with self._changed:
            self._has_cancelled = True
            self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until `step` has work, for at most `seconds`; return whether it has."""
        with self._changed:
            return self._changed.wait_for(self._has_work, seconds)

    # --- the thread that steps ----------------------------------------------------------------------------------------

    def open(self, options: BatchOptions) -> int:
        """Open a batch, or share the open one; see `Engine.open`."""
        with self._stepping:
            self.check_open()
            self._end_cancelled()
            if not (self.running or self._queue):
                self._loop, self._options, self.lost_by = self._open_batch(options), options, None
            elif options != self._options:
                raise GenerationError(BUSY)
            self.chunk = self.runner.capacity.chunk_of(chunk_tokens(options), self.manifest.graph.max_length)
            return self.chunk

    def step(self) -> bool:
        """Give free rows to waiting requests, and run one step of all rows. False if there was nothing to do.

        An error of the run ends the requests in the batch, and is not raised. Ctrl-C during a step ends them with
        `interrupted`, and is raised; use `Ticket.cancel` to end a single request. Raises exceptions of listeners after
        all have received their pieces.
        """
        with self._stepping:
            if self.closed:
                return False
            self.check_process()
            did = self._end_cancelled() if self._has_cancelled else 0
            if self._queue:
                did += self._admit()
            stepped = [ticket for ticket in self._rows if ticket is not None]
            if not stepped or self._loop is None:
                return did > 0
            try:
                step = self._loop.step()
                if step is None:
                    raise GenerationError("the generation has ended, but some of its requests have not")
            except (PartitaError, MemoryError) as error:
                self._lose(error if isinstance(error, PartitaError) else out_of_memory())
                return True
            except BaseException:
                self._lose(None)
                raise
            try:
                self._pass_on(step, stepped)
            except BaseException as error:
                if not isinstance(error, Exception):  # Ctrl-C: rows may be inconsistent
                    self._lose(None)
                raise
            return True

    def _close(self) -> None:
        """End all requests with an error."""
        with self._stepping:
            with self._changed:
                tickets = [*filter(None, self._rows), *self._queue]
                self._queue.clear()
                self._changed.notify_all()
            self.lost_by = error = GenerationError(CLOSED)
            pieces = [(ticket, self._over(ticket, "error", error)) for ticket in tickets if ticket.state != "finished"]
            self._rows = [None] * len(self._rows)
            self._loop = None
            with suppress(Exception):  # exceptions of listeners
                notify_listeners(pieces)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        listed = [*self._queue, *filter(None, self._rows)]
        ending = any(ticket.cancelled and ticket.state != "finished" for ticket in listed)
        return ending or self.running > 0 or (bool(self._queue) and self._can_begin())

    def _can_begin(self) -> bool:
        """Whether a row is free, and the first waiting request is independent of running requests.

        No other request overtakes it.
        """
        if not self.running:
            return True
        with self._changed:
            first = self._queue[0] if self._queue else None
        if first is None or None not in self._rows:
            return False
        limit, others = self._exclusive_length, [other for other in self._rows if other is not None]
        own_adapters = self.runner.contract.adapters_by_row
        fits = own_adapters or all(self._adapter(other) == self._adapter(first) for other in others)
        return fits and (limit is None or all(other.longest <= limit for other in (first, *others)))

    def _end_cancelled(self) -> int:
        """End cancelled requests; return their number."""
        with self._changed:
            self._has_cancelled = False
            gone = [ticket for ticket in self._queue if ticket.cancelled]
            for ticket in gone:
                self._queue.remove(ticket)
        gone += [ticket for ticket in self._rows if ticket is not None and ticket.cancelled]
        gone = [ticket for ticket in gone if ticket.state != "finished"]
        notify_listeners([(ticket, self._over(ticket, "interrupted")) for ticket in gone])
        return len(gone)

    def _admit(self) -> int:
        """Give free rows to waiting requests; the number handled."""
        done = 0
        while self._can_begin():
            with self._changed:
                ticket = self._queue.popleft() if self._queue else None
            if ticket is None:
                break
            done += 1
            self._begin(ticket)
        return done

    def _begin(self, ticket: Ticket) -> None:
        """Give a request a row; an error ends only this request."""
        try:
            if self._loop is None:
                self._loop = self._open_batch(self._options)
            row = self._loop.add_request(self._request(ticket))
        except (PartitaError, MemoryError) as raised:
            error = raised if isinstance(raised, PartitaError) else out_of_memory()
            its_own = isinstance(error, (GenerationError, UsageError, PackageError))  # PackageError: its adapter's file
            if not its_own or (isinstance(error, PackageError) and self._loop is None):
                self._lose(error)
                error = self.lost_by or error
            notify_listeners([(ticket, self._over(ticket, "error", error))])
            return
        except Exception as error:
            failure = GenerationError(f"it could not start: {type(error).__name__}: {error}")
            self.lost_by = self.lost_by or failure  # not specific to this request
            notify_listeners([(ticket, self._over(ticket, "error", failure))])
            raise
        except BaseException:  # Ctrl-C: the batch may already have given it the row
            with self._changed:
                self._queue.appendleft(ticket)
            self._lose(None)
            raise
        self._rows[row] = ticket
        ticket.row, ticket.state, ticket.began = row, "running", time.perf_counter()

    def _request(self, ticket: Ticket) -> Request:
        """The loop's request of a ticket. Raises UsageError."""
        work, sampler = ticket.work, make_sampler(ticket.work.sampling)
        return Request(
            work.prompt,
            sampler if work.logprobs is None else RecordingSampler(sampler, work.logprobs),
            work.sampling.max_new_tokens or 0,
            frozenset(work.stop_ids),
            fails_alone=True,
            adapter=work.adapter,
            is_warm_up=work.is_warm_up,
        )

    def _adapter(self, ticket: Ticket) -> str | None:
        """The adapter of a request."""
        return self._options.adapter if ticket.work.adapter is None else ticket.work.adapter

    def _pass_on(self, step: Step, stepped: Sequence[Ticket]) -> None:
        """Pass every request the tokens of its row, then its listener the piece, then observers the step."""
        pieces: list[tuple[Ticket, RequestOutput]] = []
        observers: dict[Callable[[Step], object] | None, None] = {}
        for ticket in stepped:
            observers[ticket.on_step] = None
            try:
                piece = self._take(ticket, step)
            except Exception as error:  # noqa: BLE001 - ends only this request
                reason = GenerationError(f"its tokens cannot be decoded: {type(error).__name__}: {error}")
                ticket.stream = None
                piece = self._over(ticket, "error", error if isinstance(error, PartitaError) else reason)
            if piece is not None:
                pieces.append((ticket, piece))
        try:
            notify_listeners(pieces)
        finally:
            for on_step in observers:
                if on_step is not None:
                    on_step(step)

    def _take(self, ticket: Ticket, step: Step) -> RequestOutput | None:
        """The output of a step for a request; None without any."""
        row = ticket.row
        assert row is not None
        new = step.tokens[row]
        if step.prefix_tokens:
            ticket.copied_tokens += step.prefix_tokens[row]
        tokens, text = ticket.take(new, step.finish[row])
        if tokens and ticket.first_token is None:
            ticket.first_token = time.perf_counter()
        logprobs = step.logprobs[row][: len(tokens)] if step.logprobs else ()
        if ticket.finish is None:
            return RequestOutput(text, tokens, logprobs, None) if tokens or text else None
        wrong = step.errors[row] if step.errors else None
        self._over(ticket, ticket.finish, None if wrong is None else GenerationError(wrong))
        return RequestOutput(text, tokens, logprobs, ticket.finish)

    def _over(self, ticket: Ticket, reason: str, error: PartitaError | None = None) -> RequestOutput:
        """End a request and free its row; return its last piece."""
        text = ticket.end_text()
        ticket.finish = reason
        ticket.state, ticket.error, ticket.ended = "finished", error, time.perf_counter()
        self._free(ticket)
        return RequestOutput(text, (), (), reason)

    def _free(self, ticket: Ticket) -> None:
        """Remove a request from its row, if it has one."""
        row, ticket.row = ticket.row, None
        if row is None:
            return
        self._rows[row] = None
        if self._loop is not None:
            with suppress(PartitaError):  # the next step shows that the batch is lost
                self._loop.release_row(row)

    def _lose(self, error: PartitaError | None) -> None:
        """Drop the batch and end all its running requests."""
        self._loop, self.lost_by = None, error or self.lost_by
        lost = [ticket for ticket in self._rows if ticket is not None]
        self._rows = [None] * len(self._rows)
        for ticket in lost:
            ticket.row = None
        reason = "interrupted" if error is None else "error"
        notify_listeners([(ticket, self._over(ticket, reason, error)) for ticket in lost if ticket.state == "running"])
