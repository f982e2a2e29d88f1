"""A package loaded in this process, and the scheduler of its requests.

First come, first served: a free row is given to the next request at once. One thread steps at a time; any thread may
submit and cancel. An error of one row, or in decoding its text, ends its request. An error of a run ends every request
in the batch, and waiting requests begin in a new batch. A listener that raises ends only its own request.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from partita.errors import (
    GenerationError,
    PackageError,
    PartitaError,
    ReportError,
    ResourceError,
    UsageError,
    out_of_memory,
)
from partita.foreign.folder import NO_CHOICE, Choice
from partita.library.api import QUIET, Audience
from partita.library.chain import Target
from partita.library.engine.base import (
    BUSY,
    CLOSED,
    Engine,
    OpenedPackage,
    PrefixSaved,
    ReportFacts,
    ReportRequest,
)
from partita.library.engine.drafters import Drafters
from partita.library.engine.requests import NO_OUTPUT, RequestOutput, Ticket, Work, notify_listeners, speculation_fact
from partita.library.place.probing import REFUSAL_SECONDS, probe_package, refusals_explained
from partita.library.run_report import option_texts
from partita.options.generation import BatchOptions
from partita.package.folder import Manifest
from partita.partition_reports.records import Request as Asked
from partita.runtime.chain.open_chain import chain_entry, idle_providers
from partita.runtime.chain.pins import parse_pins
from partita.runtime.generate.choice.sampling import RecordingSampler, make_sampler
from partita.runtime.generate.loop import PREFILL_CHUNK_TOKENS, GenerationLoop
from partita.runtime.generate.prefix_file import PrefixContent, identity, read_content, read_prefix, write_prefix
from partita.runtime.generate.record import Step
from partita.runtime.generate.request import Prefix, Request
from partita.runtime.generate.run_facts import run_facts, with_optimised
from partita.runtime.generate.runner import Runner, load_runner
from partita.runtime.generate.text.tokens import TextStream
from partita.runtime.machine import environment


class LocalEngine(Engine):
    """A loaded package; see `Engine`. Close it."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        target: Target,
        choice: Choice = NO_CHOICE,
        *,
        observe: bool = True,
        refusal_seconds: float = REFUSAL_SECONDS,
        audience: Audience = QUIET,
    ) -> None:
        """Open the package. `choice`: of a foreign folder, for reports.

        Raises PackageError, ResourceError, UsageError; ProviderError when the chain cannot be honoured, explained by
        experiments of at most `refusal_seconds`.
        """
        super().__init__(folder, manifest, target)
        self._choice, self.audience = choice, audience
        with refusals_explained(min(refusal_seconds, REFUSAL_SECONDS), audience):
            self.runner = runner = load_runner(
                folder,
                target.chain,
                threads=target.threads,
                observe=observe,
                manifest=manifest,
                options=target.options,
                pins=parse_pins(target.pins, target.chain),
            )
        self._drafters = Drafters(folder, target)
        self._closing = weakref.finalize(self, _free, runner, self._drafters, self._process)
        graphs = runner.graphs
        idle = {name for entry in graphs for name in idle_providers(entry.session, entry.model)}
        self.opened = OpenedPackage(
            chain=(*target.skipped, *map(chain_entry, runner.resolutions)),
            idle_providers=tuple(sorted(idle)),
            load_seconds=sum(entry.session.load_seconds for entry in graphs),
            slots=runner.rows,
            notes=tuple(note for entry in graphs for note in entry.session.notes),
        )
        self._exclusive_length = (runner.contract.recompute_above or 0) if runner.has_rope_length else None
        """Text length above which a row changes the rotary frequencies of other rows. None: rows are independent."""
        self._options = BatchOptions()
        self._recorded: BatchOptions | None = None
        """Options of the recorded requests."""
        self._loop: GenerationLoop | None = None
        """None before the first batch, or after an error of a run; the next request opens another."""
        self._rows: list[Ticket | None] = [None] * runner.rows
        """Running requests."""
        self._queue: deque[Ticket] = deque()
        self._changed = threading.Condition()
        """Guards the queue."""
        self._has_cancelled = False
        """Whether a request was cancelled since the last step."""
        self._identity = functools.cache(functools.partial(identity, folder, manifest, graphs))
        """The hash of the package with an adapter, for prefixes; computed once from its files."""
        self._prefixes: dict[tuple[Path, str | None], Prefix] = {}
        """The last prefix by file and adapter, so that a reopened batch needs no file."""

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
            return bool(self._changed.wait_for(lambda: self.running or self._queue, seconds))

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
            self.chunk = self.runner.capacity.chunk_of(_chunk_tokens(options), self.manifest.graph.max_length)
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
            while self._queue and self._can_begin():
                with self._changed:
                    ticket = self._queue.popleft()
                did += 1
                self._begin(ticket)
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
        with self._stepping:
            with self._changed:
                tickets = [*filter(None, self._rows), *self._queue]
                self._queue.clear()
                self._changed.notify_all()
            self._loop, self.lost_by = None, GenerationError(CLOSED)
            ended = [each for each in tickets if each.state != "finished"]
            with suppress(Exception):  # exceptions of listeners
                notify_listeners([(ticket, self._over(ticket, "error", self.lost_by)) for ticket in ended])
            self._closing()

    # --- the package --------------------------------------------------------------------------------------------------

    def report_facts(self, request: ReportRequest) -> ReportFacts:
        """The data of the report; see `Engine.report_facts`."""
        with self._stepping:
            last, runner = self._recorded, self.runner
            if last is None or not runner.recorder.steps:
                missing = "nothing has been generated yet" if last is None else "no request has been answered yet"
                raise ReportError(f"nothing to report: {missing}")
            facts = run_facts(runner, request.notes)
            facts = replace(
                facts,
                speculation=speculation_fact(last),
                finish_reason=request.finish_reason or facts.finish_reason,
                finish_detail=request.finish_detail,
                tokenizer_load_seconds=request.tokenizer_load_seconds,
            )
            if request.complete:
                facts = with_optimised(facts, [entry.session for entry in runner.graphs])
            recorder = runner.recorder
            adapters = " / ".join(name or "none" for name in recorder.adapters) if any(recorder.adapters) else None
            requested = Asked(
                verb="generate",
                path=str(self.folder),
                chain=tuple(resolution.provider.ort_name for resolution in runner.resolutions),
                chain_source=self.target.source,
                options={
                    **request.options,
                    **({} if adapters is None else {"adapter": adapters}),
                    **last.speculation_texts(),
                    **option_texts(self.target, self._choice),
                },
                threads=self.target.threads,
                prompt_tokens=recorder.longest,
                max_new_tokens=recorder.max_new_tokens,
                limits=request.limits.by_option(),
                prefill_chunk_tokens=runner.capacity.chunk_of(_chunk_tokens(last), recorder.longest),
            )
            alone, seconds = replace(facts, notes=()), request.probe_seconds
            probed, chain = probe_package(alone, runner.resolutions, self.folder, seconds, self.audience)
            entries, facts = (*self.target.skipped, *map(chain_entry, chain)), replace(probed, notes=facts.notes)
            return facts, probed.notes, entries, environment(), requested, request.limits

    def save_prefix(self, prefix: PrefixContent, file: str, prefill_chunk: int | None = None) -> PrefixSaved:
        """Prefill a prefix and write its states to a file; see `Engine.save_prefix`."""
        with self._stepping:
            self.check_open()
            self._end_cancelled()
            if self.running or self.waiting:
                raise GenerationError(BUSY)
            loop = self._open_batch(BatchOptions(prefill_chunk=prefill_chunk, adapter=prefix.adapter))
            self._recorded = self._loop = None
            row, seconds = loop.add_request(Request(prefix.tokens)), 0.0
            while (step := loop.step()) is not None:
                seconds += step.run_seconds
            size = write_prefix(Path(file), loop.save_prefix(row), prefix, self._identity(prefix.adapter))
            return PrefixSaved(len(prefix.tokens), size, seconds)

    def _open_batch(self, options: BatchOptions) -> GenerationLoop:
        """A batch with free rows, and a new record. Raises GenerationError, UsageError, PackageError."""
        prefix = None if options.prefix is None else self._prefix(Path(options.prefix), options.adapter)
        self.runner.use_adapters(options.adapter)
        chunk = _chunk_tokens(options)
        loop = GenerationLoop(self.runner, chunk, shares=True, patience=chunk, records=True)
        loop.drafter, loop.control = self._drafters.drafting(self.runner, options)
        if prefix is not None:
            loop.prefixes.add(prefix)
        self.runner.begin()
        self._recorded = options
        return loop

    def _prefix(self, file: Path, adapter: str | None) -> Prefix:
        """The prefix in a file for this adapter. Raises GenerationError for a prefix of another package."""
        if (file, adapter) not in self._prefixes:
            shapes = self.runner.cache.row_shapes(len(read_content(file).tokens))
            self._prefixes = {(file, adapter): read_prefix(file, self._identity(adapter), adapter, shapes)}
        return self._prefixes[file, adapter]

    def _can_begin(self) -> bool:
        """Whether a row is free, and the first waiting request is independent of running requests.

        No other request overtakes it.
        """
        if not self.running or None not in self._rows:
            return not self.running
        tickets, limit = [self._queue[0], *filter(None, self._rows)], self._exclusive_length
        adapters = {ticket.work.adapter or self._options.adapter for ticket in tickets}
        fits = self.runner.contract.adapters_by_row or len(adapters) == 1
        return fits and (limit is None or all(ticket.longest <= limit for ticket in tickets))

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

    def _begin(self, ticket: Ticket) -> None:
        """Give a request a row; an error ends only this request."""
        work = ticket.work
        try:
            if self._loop is None:
                self._loop = self._open_batch(self._options)
            sampler = make_sampler(work.sampling)
            request = Request(
                work.prompt,
                sampler if work.logprobs is None else RecordingSampler(sampler, work.logprobs),
                work.sampling.max_new_tokens or 0,
                frozenset(work.stop_ids),
                fails_alone=True,
                adapter=work.adapter,
                is_warm_up=work.is_warm_up,
            )
            row = self._loop.add_request(request)
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
        """Add the output of a step to a request, without tokens after a stop string; None without any."""
        row, stream, text = ticket.row, ticket.stream, ""
        assert row is not None
        tokens, finish = step.tokens[row], step.finish[row]
        if step.prefix_tokens:
            ticket.copied_tokens += step.prefix_tokens[row]
        if stream is not None:
            for count, token in enumerate(tokens, start=1):
                text += stream.push(token)
                if stream.stopped:
                    finish, tokens = "stop", tokens[:count]
                    break
        logprobs = step.logprobs[row][: len(tokens)] if step.logprobs else ()
        if finish is None:
            return ticket.add(RequestOutput(text, tokens, logprobs, None)) if tokens or text else None
        wrong = step.errors[row] if step.errors else None
        error = None if wrong is None else GenerationError(wrong)
        return self._over(ticket, finish, error, RequestOutput(text, tokens, logprobs, finish))

    def _over(
        self, ticket: Ticket, reason: str, error: PartitaError | None = None, last: RequestOutput = NO_OUTPUT
    ) -> RequestOutput:
        """End a request and free its row; return its last piece, with the text that was held back."""
        row, stream, ticket.stream = ticket.row, ticket.stream, None
        text = last.text if stream is None else last.text + stream.finish()
        piece = ticket.add(last._replace(text=text, finish_reason=reason), error)
        if row is not None:
            ticket.row = self._rows[row] = None
            if self._loop is not None:
                with suppress(PartitaError):  # the next step shows that the batch is lost
                    self._loop.release_row(row)
        return piece

    def _lose(self, error: PartitaError | None) -> None:
        """Drop the batch and end all its running requests. A lack of memory names the largest settings that fit."""
        if isinstance(error, ResourceError):
            from partita.library.planning import with_what_fits

            error = with_what_fits(error, self.folder, self.manifest, self.target.chain)
        self._loop, self.lost_by = None, error or self.lost_by
        reason, lost = "interrupted" if error is None else "error", [each for each in self._rows if each is not None]
        notify_listeners([(ticket, self._over(ticket, reason, error)) for ticket in lost])


def _chunk_tokens(options: BatchOptions) -> int:
    """Prompt tokens per run."""
    return PREFILL_CHUNK_TOKENS if options.prefill_chunk is None else options.prefill_chunk


def _free(runner: Runner, drafters: Drafters, process: int) -> None:
    """Free the sessions, unless this process is a fork."""
    if os.getpid() == process:
        drafters.close()
        runner.close()
