"""A package that is served: its engine and scheduler, the thread that steps them, and what is measured of requests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from partita.check.limits import Limits
from partita.errors import PartitaError
from partita.library.engine import Begun, Engine, ReportRequest, RowRequest
from partita.library.run_report import limits_error
from partita.library.sampling import Sampling
from partita.library.scheduler import Piece, Scheduler, Ticket, Work
from partita.library.speculation import NO_SPECULATION, Speculation
from partita.partition_reports.records import Report
from partita.runtime.in_time import LateError, in_time
from partita.serve.explained import explained
from partita.serve.metrics import Metrics
from partita.serve.prompts import Reading
from partita.serve.restarting import Restarting

Hear = Callable[[Ticket, Piece], object]
IDLE_SECONDS = 1.0
"""Longest wait for work before the thread looks whether it is to end."""
WARM_TOKENS = 6
"""Of the request at the start: enough for the runs that are observed for the report (`runtime.observe`)."""
REPORT_SECONDS = 5.0
"""A report is made anew at most so often: requests wait while it is made."""
READ_SECONDS = 120.0
"""Reading the prompts of one request, which has limits of its own; a server whose reader takes longer is down."""
END_SECONDS = 5.0
"""At the end, for the step that is going on; Python cannot end native code."""


class Served:
    """One package under its name. `start` before requests come, `stop` when there will be no more."""

    def __init__(
        self,
        name: str,
        folder: Path,
        engine: Restarting,
        reading: Reading,
        metrics: Metrics,
        *,
        told: Callable[[str], object],
        fingerprint: str,
        prefill_chunk: int | None = None,
        adapter: str | None = None,
        adapters: Sequence[str] = (),
        speculation: Speculation = NO_SPECULATION,
        prefix: str | None = None,
    ) -> None:
        """`told` hears a line for the operator. `adapter`: that of requests which name none of `adapters`. Raises
        UsageError for a chunk that makes no sense, GenerationError for a prefix that is not of this package.
        """
        self.name, self.folder, self.reading, self.fingerprint = name, folder, reading, fingerprint
        self.adapters = tuple(adapters)
        self.created = int(time.time())
        self._engine, self._metrics, self._told = engine, metrics, told
        self._scheduler = Scheduler(
            cast(Engine, engine),
            reading.text,
            prefill_chunk=prefill_chunk,
            adapter=adapter,
            speculation=speculation,
            prefix=prefix,
        )
        self.encoder = ThreadPoolExecutor(1, f"encode-{name}")
        """Reads prompts: transformers' tokenizers are not made for two threads at once."""
        self._reading_at = math.inf
        """When the reading of prompts began that goes on."""
        self.unread = 0
        """Answers whose prompts are not read yet. The event loop's alone."""
        self.reporter = ThreadPoolExecutor(1, f"report-{name}")
        """Shows reports, one at a time: requests wait while one is made, and the page of a large one takes its time."""
        self._shown: tuple[Report | None, dict[str, str]] = None, {}
        """A report, and what was shown of it, by view."""
        self._thread = threading.Thread(target=self._work, name=f"serve-{name}", daemon=True)
        self._stopping = False
        self._report: Report | None = None
        self._report_at = 0.0
        self._limits = Limits()
        """That the placement was asked to keep to."""
        self._probed: Report | None = None
        """The report of the start, where experiments were made for it; that it is of the start is not in its notes."""
        self._reporting = threading.Lock()

    @property
    def slots(self) -> int:
        """Rows of the batch."""
        return self._scheduler.slots

    @property
    def open(self) -> int:
        """Prompts that wait or are at work."""
        return self._scheduler.waiting + self._scheduler.running

    @property
    def up(self) -> bool:
        """False after the process of the package was lost and could not be started again, and while the reading of
        prompts does not come back.
        """
        return self._engine.up and time.monotonic() - self._reading_at < READ_SECONDS

    def read(self, prompts: Callable[[], list[Work]]) -> list[Work]:
        """What `prompts` reads. Only for the thread of `encoder`."""
        self._reading_at = time.monotonic()
        try:
            return prompts()
        finally:
            self._reading_at = math.inf

    def start(self, limits: Limits, probe_seconds: float) -> None:
        """Generate a few tokens, report where they ran, and begin to work.

        Raises ProviderError when the placement does not keep to `limits`, and whatever the run raises.
        """
        self._warm()
        self._limits = limits
        request = ReportRequest(
            finish_reason="length", limits=limits, probe_seconds=probe_seconds, notes=("made at the start of a server",)
        )
        self._report = self._engine.report(request)
        self._report_at = time.monotonic()
        over = limits_error(self._report)
        if over is not None:
            raise over
        if self._report.probing is not None:
            notes = tuple(line for line in self._report.notes if line not in request.notes)
            self._probed = self._report.model_copy(update={"notes": notes})
        self._metrics.place(self.name, self._report)
        self._engine.check = self._look_again
        scheduler = self._scheduler
        self._metrics.watch(
            self.name, self.slots, lambda: scheduler.running, lambda: scheduler.waiting, lambda: self.up
        )
        self._thread.start()

    @property
    def _first(self) -> Work:
        """The request at the start."""
        most = min(WARM_TOKENS, self.reading.max_length - 1)
        return Work((0,), Sampling(temperature=0.0, max_new_tokens=most))

    def _look_again(self, engine: Engine, begun: Begun) -> None:
        """The package was loaded again, and may run elsewhere now: the same as at the start, before it answers anybody.

        Raises ProviderError when the placement does not keep to the limits, and whatever the run raises.
        """
        work = self._first
        engine.join(begun.number, RowRequest(work.prompt, work.sampling))
        while (step := engine.step(begun.number)) is not None and not any(step.finish):
            pass
        request = ReportRequest(finish_reason="length", limits=self._limits, notes=("made when it was loaded again",))
        report = engine.report(request)
        self._metrics.place(self.name, report)
        over = limits_error(report)
        if over is not None:
            raise over
        with self._reporting:
            self._report, self._report_at = explained(report, self._probed), time.monotonic()

    def _warm(self) -> None:
        """Generate a few tokens, and one with each adapter: one that cannot be read is found before anybody asks."""
        one = replace(self._first, sampling=replace(self._first.sampling, max_new_tokens=1), trial=True)
        for work in (self._first, *(replace(one, adapter=name) for name in self.adapters)):
            ticket = self._scheduler.submit(work)
            while ticket.state != "over":
                self._scheduler.step()
            if ticket.error is not None:
                raise ticket.error

    def submit(self, work: Work, hear: Hear) -> Ticket:
        """Have a prompt wait for its turn; `hear` is called from the thread that steps. Raises GenerationError."""
        ticket = self._scheduler.submit(work, partial(self._measure, _Clock(), hear))
        self._metrics.prompt_tokens.labels(self.name).inc(len(work.prompt))
        return ticket

    def report(self) -> Report:
        """The partition report of the running sessions, at most some seconds old. Takes time: not for an event loop."""
        with self._reporting:
            if self._report is None or time.monotonic() - self._report_at > REPORT_SECONDS:
                report = self._engine.report(ReportRequest(finish_reason="length", limits=self._limits))
                self._report = explained(report, self._probed)
                self._report_at = time.monotonic()
            return self._report

    def shown(self, view: str, to_text: Callable[[Report], str]) -> str:
        """A view of the report, which is set in type once. Only for the thread of `reporter`."""
        report = self.report()
        if self._shown[0] is not report:
            self._shown = report, {}
        texts = self._shown[1]
        if view not in texts:
            texts[view] = to_text(report)
        return texts[view]

    def stop(self) -> None:
        """End what is left, and free the package. A step, a report or the reading of a prompt that does not end in time
        is left where it is: `in_time.left` says so then, and the process has to end without waiting for it.
        """
        self._stopping = True
        for pool in (self.encoder, self.reporter):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._engine.apart:
            if self._thread.is_alive():
                self._thread.join(END_SECONDS)
            self._engine.close()  # which ends whatever goes on there
        try:
            in_time(self._close, lambda: None, END_SECONDS)
        except LateError:
            self._told(f"{self.name}: a step, a report or a prompt's reading does not end, and is left where it is")

    def _close(self) -> None:
        if self._thread.is_alive():
            self._thread.join()
        self._scheduler.close()
        self._engine.close()
        for pool in (self.encoder, self.reporter):
            pool.shutdown()

    # --- the thread that steps ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stopping:
            try:
                if not self._scheduler.step():
                    self._engine.try_again()
                    self._scheduler.wait(IDLE_SECONDS)
            except BaseException as error:  # noqa: BLE001 - whatever it was, the next request finds a thread at work
                with suppress(Exception):  # nor is it to end because nobody can be told
                    self._told(f"internal error: {type(error).__name__}: {error}; this is a bug in Partita")

    def _measure(self, clock: _Clock, hear: Hear, ticket: Ticket, piece: Piece) -> None:
        now, name, metrics = time.perf_counter(), self.name, self._metrics
        if clock.last is None and ticket.began is not None:
            metrics.queue_seconds.labels(name).observe(ticket.began - ticket.submitted)
            clock.last = ticket.began
        if piece.tokens:
            if clock.tokens == 0:
                metrics.first_token_seconds.labels(name).observe(now - ticket.submitted)
            elif clock.last is not None:
                each = (now - clock.last) / len(piece.tokens)
                for _ in piece.tokens:
                    metrics.between_seconds.labels(name).observe(each)
            clock.tokens, clock.last = clock.tokens + len(piece.tokens), now
            metrics.new_tokens.labels(name).inc(len(piece.tokens))
        if piece.finish_reason is not None:
            metrics.ended.labels(name, piece.finish_reason).inc()
        hear(ticket, piece)  # before a line for the operator, which may fail: a client waits
        if piece.finish_reason == "error" and isinstance(ticket.error, PartitaError):
            self._told(f"{name}: {ticket.error}")


class _Clock:
    """When the last token of a request came."""

    __slots__ = ("last", "tokens")

    def __init__(self) -> None:
        self.last: float | None = None
        self.tokens = 0
