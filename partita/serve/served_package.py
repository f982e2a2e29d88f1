"""A served package: its engine, the thread that steps it, and its report."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from partita.check.requirements import Limits
from partita.foreign.folder import Choice
from partita.library.api import QUIET, Audience
from partita.library.chain import Target
from partita.library.engine.base import ReportRequest, Restarts
from partita.library.engine.requests import RequestOutput, Ticket, Work, check_speculation
from partita.library.loading import open_engine, opened_notes
from partita.library.run_report import limits_error
from partita.library.sampling import CHECKPOINT, Suggestion, suggestion
from partita.observations.text_format import plural
from partita.options.fields import group
from partita.options.generation import BatchOptions, Sampling, ServeCommand
from partita.options.groups import Process
from partita.package.folder import Manifest, not_exported
from partita.partition_reports.records import Report
from partita.runtime.generate.checks import check_adapter
from partita.runtime.generate.choice.sampling import TokenLogprobs
from partita.runtime.generate.prefix_file import read_content
from partita.runtime.generate.text.chat_templates import has_template
from partita.runtime.generate.text.tokens import load_text, stop_token_ids
from partita.runtime.time_limit import LateError, in_time
from partita.serve.metrics import Metrics

IDLE_SECONDS = 1.0
"""Maximum seconds to wait for work before the thread checks whether to end."""
WARM_TOKENS = 6
"""New tokens of the first request; enough for the profiled runs of the report."""
REPORT_SECONDS = 5.0
"""Minimum seconds between two new reports."""
END_SECONDS = 5.0
"""Seconds for the last step; Python cannot stop native code."""
DEFAULTS = Suggestion(temperature=1.0)
"""OpenAI's defaults: sample from the unmodified distribution."""


@dataclass(eq=False, slots=True)
class ResponseChoice:
    """One choice of a response: its request in the scheduler."""

    number: int
    """Index of the choice."""
    deliver: Callable[[Delivery], object]
    """Called in the event loop with each piece."""
    ticket: Ticket = field(init=False)
    """The submitted request."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of a response that is sent as one object."""
    has_begun: bool = False
    last_token: float | None = None
    """Time of the last token, by `time.perf_counter`."""


class Delivery(NamedTuple):
    """A piece on its way to the event loop."""

    choice: ResponseChoice
    piece: RequestOutput


class ServedPackage:
    """One package under its name, from its opening until `stop`."""

    def __init__(
        self,
        name: str,
        folder: Path,
        manifest: Manifest,
        target: Target,
        options: ServeCommand,
        metrics: Metrics,
        *,
        log: Callable[[str], object],
        audience: Audience = QUIET,
        prefix: Path | None = None,
        process: Process = "auto",
    ) -> None:
        """Open a package, generate a few tokens with it, and start serving it.

        `log` is called with lines for the operator. `prefix`: a prefix file for prompts that begin with it. Raises
        PackageError, also without a tokenizer; ProviderError when the chain is not honoured or limits are exceeded;
        GenerationError for a prefix of another package; ResourceError, UsageError.
        """
        known = 0 if prefix is None else len(read_content(prefix).tokens)  # a bad file fails before the package loads
        batch = replace(group(options, BatchOptions), prefix=None if prefix is None else prefix.absolute())
        check_adapter(folder, manifest, batch.adapter)
        check_speculation(folder, manifest, batch)
        self.text = load_text(folder, manifest.tokenizer, manifest.graph.max_length, takes_ids=False)
        self.text.encode("hello")  # initialises the tokenizer before two threads use it
        self.name, self.folder = name, folder
        self.max_length, self.vocab_size = manifest.graph.max_length, manifest.graph.vocab_size
        self.stop_ids, self.has_template = stop_token_ids(folder), has_template(folder)
        self.suggests = suggestion(folder) if options.source == CHECKPOINT else DEFAULTS
        """Sampling options that a request does not set."""
        self.adapters = adapters_of(manifest)
        self.fingerprint = _fingerprint(manifest, target)
        self.created = int(time.time())
        self._limits, self._metrics, self._log = Limits.of(options), metrics, log
        self._tokens = metrics.of_model(name)
        self.encoder = ThreadPoolExecutor(1, f"encode-{name}")
        """Thread for tokenizing prompts, because transformers' tokenizers are not thread-safe."""
        self.unread = 0
        """Choices whose prompts are not tokenized yet. Changed only by the event loop."""
        self.reporter = ThreadPoolExecutor(1, f"report-{name}")
        """Builds and renders reports, one at a time."""
        self._report: Report | None = None
        self._report_at = 0.0
        self._thread = threading.Thread(target=self._work, name=f"serve-{name}", daemon=True)
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliveries: list[Delivery] = []
        """Pieces of the current step."""
        with audience.busy(f"opening {name}"):
            self._engine = engine = open_engine(folder, manifest, target, Choice.of(options), process=process)
        try:
            for line in opened_notes(target, engine.opened, manifest):
                audience.note(line)
            if lacks := not_exported(manifest.source.unused):
                audience.note(f"not in the package: {lacks}")
            engine.use_text(self.text)
            engine.open(batch)
            if known:
                audience.note(f"prompts that begin with the {plural(known, 'token')} of {prefix} reuse its states")
            with audience.busy(f"first run of {name}"):
                self._start(options.probe_seconds)
        except BaseException:
            engine.close()
            raise

    @property
    def slots(self) -> int:
        """Rows of the batch."""
        return self._engine.slots

    @property
    def open_prompts(self) -> int:
        """Number of waiting and running prompts."""
        return self._engine.waiting + self._engine.running

    @property
    def is_running(self) -> bool:
        """False after the package's process was lost and could not be restarted."""
        return self._engine.is_running

    def _start(self, probe_seconds: float) -> None:
        """Generate a few tokens, and one with each adapter to detect damaged files; build the report, with experiments
        of at most `probe_seconds`, and start the thread.

        Raises ProviderError when the placement exceeds the limits, and the errors of the run.
        """
        self._run(first := self._first)
        for name in self.adapters:
            one = replace(first.sampling, max_new_tokens=1)
            self._run(replace(first, sampling=one, is_warm_up=True, adapter=name))
        self._check_report(ReportRequest("length", notes=("created when the server started",)), probe_seconds)
        engine = self._engine
        engine.restarts = Restarts(lambda line: self._log(f"{self.name}: {line}"), self._check_again)
        self._metrics.watch(
            self.name, self.slots, lambda: engine.running, lambda: engine.waiting, lambda: self.is_running
        )
        self._thread.start()

    def _check_again(self) -> None:
        """Check a restarted package, whose placement may have changed. Raises ProviderError and errors of the run."""
        self._run(self._first)
        self._check_report(ReportRequest("length", complete=False, notes=("created when the model was reloaded",)))

    def _check_report(self, request: ReportRequest, probe_seconds: float = 0.0) -> None:
        """A new report, in the metrics, too. Raises ProviderError over the limits."""
        request = replace(request, limits=self._limits, probe_seconds=probe_seconds)
        report = self._metrics.reports[self.name] = self._engine.report(request)
        over = limits_error(report)
        if over is not None:
            raise over
        self._keep(report)

    def _keep(self, report: Report) -> Report:
        self._report, self._report_at = report, time.monotonic()
        return report

    def report(self) -> Report:
        """The partition report of the running sessions. After the start, only for the thread of `reporter`.

        Raises the errors of the engine's `report`.
        """
        if self._report is not None and time.monotonic() - self._report_at <= REPORT_SECONDS:
            return self._report
        return self._keep(self._engine.report(ReportRequest("length", complete=False, limits=self._limits)))

    @property
    def _first(self) -> Work:
        """The first request."""
        most = min(WARM_TOKENS, self.max_length - 1)
        return Work((0,), Sampling(temperature=0.0, max_new_tokens=most))

    def _run(self, work: Work) -> None:
        """Run a request to its end. Raises its error."""
        ticket = self._engine.submit(work)
        while ticket.state != "finished":
            self._engine.step()
        if ticket.error is not None:
            raise ticket.error

    def submit(self, work: Work, choice: ResponseChoice) -> Ticket:
        """Queue a choice. Raises GenerationError."""
        self._loop = asyncio.get_running_loop()
        ticket = self._engine.submit(work, lambda ticket, piece: self._deliveries.append(Delivery(choice, piece)))
        self._tokens.prompt.inc(len(work.prompt))
        return ticket

    def stop(self) -> None:
        """End open requests and free the package.

        A step, report or tokenization that does not end in time is abandoned: the process must exit without waiting
        for it.
        """
        self._stopping = True
        for pool in (self.encoder, self.reporter):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._engine.in_worker:
            if self._thread.is_alive():
                self._thread.join(END_SECONDS)
            self._engine.close()  # this ends all its requests
        try:
            in_time(self._close, lambda: None, END_SECONDS)
        except LateError:
            self._log(f"{self.name}: a step, a report or a tokenization did not end and was abandoned")

    def _close(self) -> None:
        if self._thread.is_alive():
            self._thread.join()
        self._engine.close()
        self._send()
        for pool in (self.encoder, self.reporter):
            pool.shutdown()

    # --- the thread that steps ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stopping:
            try:
                try:
                    did = self._engine.step()
                finally:
                    self._send()
                if not did:
                    self._engine.wait(IDLE_SECONDS)
            except BaseException as error:  # noqa: BLE001 - the thread continues with the next request
                with suppress(Exception):  # also if the line cannot be written
                    self._log(f"internal error: {type(error).__name__}: {error}; this is a bug in Partita")

    def _send(self) -> None:
        """Pass the pieces of a step to the event loop, in one wake-up."""
        if self._deliveries and self._loop is not None:
            deliveries, self._deliveries = self._deliveries, []
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._deliver, time.perf_counter(), deliveries)

    def _deliver(self, now: float, deliveries: Sequence[Delivery]) -> None:
        """Deliver and count the pieces of a step that ended at `now` (`time.perf_counter`). Runs in the event loop."""
        for each in deliveries:
            each.choice.deliver(each)
        for choice, piece in deliveries:
            ticket, count = choice.ticket, len(piece.tokens)
            if not choice.has_begun and ticket.began is not None:
                self._tokens.queue.observe(ticket.began - ticket.submitted)
                choice.has_begun = True
            if choice.last_token is not None:
                for _ in range(count):
                    self._tokens.between.observe((now - choice.last_token) / count)
            elif count:
                self._tokens.first.observe(now - ticket.submitted)
            choice.last_token = now if count else choice.last_token
            if piece.finish_reason is not None:
                self._metrics.ended.labels(self.name, piece.finish_reason).inc()
        self._tokens.new.inc(sum(len(piece.tokens) for _, piece in deliveries))
        ended = [each.choice.ticket for each in deliveries if each.piece.finish_reason == "error"]
        for error in {id(ticket.error): ticket.error for ticket in ended}.values():
            with suppress(Exception):  # the line cannot be written
                self._log(f"{self.name}: {error}")


def adapters_of(manifest: Manifest) -> tuple[str, ...]:
    """The adapters of a package for requests."""
    return tuple(record.name for record in manifest.switchable)


def _fingerprint(manifest: Manifest, target: Target) -> str:
    """A hash that changes with everything that completions with one seed depend on: files and providers."""
    parts = [f"{entry.name} {entry.size_bytes} {entry.sha256}" for entry in manifest.files]
    parts += [provider.ort_name for provider in target.chain]
    return f"fp_{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:12]}"
