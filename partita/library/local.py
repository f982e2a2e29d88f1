"""A package loaded in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from partita.errors import GenerationError, ReportError, UsageError
from partita.foreign.folder import AS_IT_IS, Choice
from partita.library.audience import QUIET, Audience
from partita.library.batch import Batch, loop_request
from partita.library.chain import Target
from partita.library.drafters import Drafters
from partita.library.engine import (
    ANOTHER,
    CLOSED,
    FORKED,
    Begun,
    GenerateRequest,
    Opened,
    PrefixRequest,
    PrefixSaved,
    ReportRequest,
    RowRequest,
)
from partita.library.evaluating import evaluate
from partita.library.notes import gave_up
from partita.library.probing import REFUSAL_SECONDS, package_refused, probe_package
from partita.library.run_report import Asked, make_report, said_of
from partita.library.sampling import Sampling
from partita.library.speculation import NO_SPECULATION, Speculation
from partita.library.verifying import verify_with
from partita.package import Manifest, check_files
from partita.package_records import Verification
from partita.partition_reports.records import Report
from partita.runtime.adapter_names import check_adapters
from partita.runtime.chain import ChainError, chain_entry, idle_providers
from partita.runtime.engine.checks import check_chunk, check_requests
from partita.runtime.engine.loop import PREFILL_CHUNK_TOKENS
from partita.runtime.engine.prefix import Prefix
from partita.runtime.engine.recorder import Step
from partita.runtime.engine.request import Request
from partita.runtime.evaluation import Evaluation
from partita.runtime.optimised import with_optimised
from partita.runtime.ort.errors import NoKernelError
from partita.runtime.pins import parse_pins
from partita.runtime.prefix_file import Said, identity, read_prefix, read_said, write_prefix
from partita.runtime.run_facts import run_facts
from partita.runtime.runner import load_runner
from partita.runtime.sampling import make_sampler
from partita.spelling import spelled


class LocalEngine:
    """A loaded package. One generation at a time; calls from other threads wait. Close it, or use it as a
    context manager.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        target: Target,
        *,
        threads: int | None = None,
        observe: bool = True,
        refusal_seconds: float = REFUSAL_SECONDS,
        audience: Audience = QUIET,
        choice: Choice = AS_IT_IS,
    ) -> None:
        """Open the package. Raises PackageError, ResourceError, UsageError; ProviderError when the chain cannot be
        honoured, with what experiments of `refusal_seconds` tell. `choice`: by which the manifest was inferred, for
        reports.
        """
        self.folder, self.manifest, self.target, self.threads = folder, manifest, target, threads
        self.audience, self._choice = audience, choice
        self._lock = threading.RLock()
        self._last: Batch | None = None
        self._number, self._over, self._closed = 0, True, False
        self._process = os.getpid()
        self._gave_up: set[str] = set()
        self._identities: dict[str | None, str] = {}
        self._notes: tuple[str, ...] = ()
        """What was worth knowing of the last generation."""
        try:
            self.runner = load_runner(
                folder,
                target.chain,
                threads=threads,
                observe=observe,
                manifest=manifest,
                options=target.options,
                pins=parse_pins(target.pins, target.chain),
            )
        except (ChainError, NoKernelError) as error:
            raise package_refused(error, refusal_seconds, audience) from error
        self._drafters = Drafters(folder, target, threads)
        graphs = self.runner.graphs
        self.opened = Opened(
            chain=(*target.skipped, *map(chain_entry, self.runner.resolutions)),
            idle=tuple(sorted({name for entry in graphs for name in idle_providers(entry.session, entry.model)})),
            load_seconds=sum(entry.session.load_seconds for entry in graphs),
        )

    def begin(self, request: GenerateRequest) -> Begun:
        """Begin a generation; one that was going on is over. Raises GenerationError for prompts, UsageError."""
        shared = make_sampler(request.rows[0].sampling) if request.one_sampler and request.rows else None
        requests = [loop_request(row, request.stop_ids, shared) for row in request.rows]
        with self._lock:
            self._check_open()
            check_requests(self.runner.executor, requests, _chunk(request.prefill_chunk), answered=True)
            check_adapters(self.folder, self.manifest, request.adapters)
            prefix = self._prefix(request.prefix, request.adapters)
            drafting = self._drafters.drafting(self.runner.executor, request.speculation)
            begun, batch = self._start(request.prefill_chunk, request.adapter, request.longest, is_open=False)
            batch.speculate(request.speculation, drafting)
            self.runner.on_prompts(tuple(len(row.prompt) for row in request.rows))
            for entry, row in zip(requests, request.rows, strict=True):
                batch.join(replace(entry, prefix=prefix), row.logprobs, row.adapter)
            self.runner.recorder.on_begun(self.runner.cache.filled)
            return begun

    def open(
        self,
        prefill_chunk: int | None = None,
        adapter: str | None = None,
        speculation: Speculation = NO_SPECULATION,
        prefix: str | None = None,
    ) -> Begun:
        """Begin a generation whose rows are all free; one that was going on is over. Raises UsageError, GenerationError
        for a prefix.
        """
        check_chunk(_chunk(prefill_chunk))
        with self._lock:
            self._check_open()
            given = self._prefix(prefix, (adapter,))
            drafting = self._drafters.drafting(self.runner.executor, speculation)
            begun, batch = self._start(prefill_chunk, adapter, self.manifest.graph.max_length, is_open=True)
            batch.speculate(speculation, drafting)
            if given is not None:
                batch.give(replace(given, adapter=adapter))
            self.runner.on_open()
            return begun

    def join(self, number: int, request: RowRequest) -> int:
        """Give a request a free row of the generation; its index. Raises GenerationError, UsageError."""
        with self._lock:
            asked = loop_request(request, fails_alone=True)
            return self._current(number).join(asked, request.logprobs, request.adapter, trial=request.trial)

    def leave(self, number: int, row: int) -> None:
        """Free a row, finished or not."""
        with self._lock:
            self._current(number).leave(row)

    def halt(self, number: int, row: int) -> None:
        """End a row where it is; it keeps what it has."""
        with self._lock:
            self._current(number).halt(row)

    def extend(self, number: int, row: int, tokens: Sequence[int], sampling: Sampling) -> None:
        """Give a row more tokens to read, and go on after them as `sampling` says. Raises GenerationError."""
        with self._lock:
            self._current(number).extend(row, tokens, sampling)

    def rewind(self, number: int, row: int, tokens: int) -> bool:
        """Take a row back by so many of its tokens; False where it cannot go back."""
        with self._lock:
            return self._current(number).rewind(row, tokens)

    def step(self, number: int) -> Step | None:
        """The next step of the generation; None when it is over. Raises what `runtime.generate` does."""
        with self._lock:
            batch = self._current(number)
            if self._over:
                return None
            try:
                step = batch.step()
            except BaseException:  # what the rows have in the cache is not to be gone on with
                self._over = True
                raise
            for line in () if step is None else gave_up(step.gave_up, self._gave_up):
                self.audience.note(line)
                self._notes += (line,)
            return step

    def report(self, request: ReportRequest) -> Report:
        """The report of the last generation. One of `begin` is over then; one of `open` goes on."""
        with self._lock:
            last = self._last
            if last is None:
                raise ReportError("nothing to report: nothing has been generated yet")
            self._over = self._over or not last.is_open
            runner = self.runner
            if last.is_open and not runner.steps:
                raise ReportError("nothing to report: no request has been answered yet")
            facts = run_facts(
                runner,
                speculation=last.speculation.fact(),
                finish_reason=request.finish_reason,
                finish_detail=request.finish_detail,
                tokenizer_load_seconds=request.tokenizer_load_seconds,
                notes=request.notes + self._notes,
            )
            if request.complete:
                facts = with_optimised(facts, [entry.session for entry in runner.graphs])
            asked = Asked(
                verb="generate",
                path=self.folder,
                chain=tuple(resolution.provider.ort_name for resolution in runner.resolutions),
                chain_source=self.target.source,
                options={
                    **request.options,
                    **_adapter_option(last.told_adapters),
                    **last.speculation.told,
                    **said_of(self.target, self._choice),
                },
                threads=self.threads,
                prompt_tokens=last.longest,
                max_new_tokens=last.max_new_tokens,
                limits=request.limits,
                skipped=self.target.skipped,
                prefill_chunk_tokens=runner.executor.graphs.chunk_of(last.prefill_chunk, last.longest),
            )
            seconds = request.probe_seconds
            facts, chain = probe_package(facts, runner.resolutions, self.folder, seconds, self.audience)
            return make_report(self.folder, self.manifest, facts, chain, asked)

    def save_prefix(self, request: PrefixRequest) -> PrefixSaved:
        """Read a prefix and write what a row has of it to a file; a generation that was going on is over.

        Raises GenerationError for tokens that the package cannot take and for states that cannot be given out,
        ReportError when the file cannot be written.
        """
        check_chunk(_chunk(request.prefill_chunk))
        with self._lock:
            _, batch = self._start(request.prefill_chunk, request.adapter, len(request.tokens), is_open=False)
            self.runner.on_prompts((len(request.tokens),))
            row, seconds = batch.join(Request(request.tokens)), 0.0
            while (step := batch.step()) is not None:
                seconds += step.run_seconds
            said = Said(request.tokens, request.text, request.system, request.adapter)
            size = write_prefix(Path(request.file), batch.saved(row), said, self._identity(request.adapter))
            self._over = True
            return PrefixSaved(size, seconds)

    def _identity(self, adapter: str | None) -> str:
        """Of the package with an adapter, as prefixes are of it; files may be read for it, once."""
        if adapter not in self._identities:
            self._identities[adapter] = identity(self.folder, self.manifest, self.runner.graphs, adapter)
        return self._identities[adapter]

    def _prefix(self, file: str | None, adapters: Sequence[str | None]) -> Prefix | None:
        """The prefix in a file, if one is given, for rows with these adapters."""
        if file is None:
            return None
        adapter, *others = dict.fromkeys(adapters)
        if others:
            raise UsageError(
                f"{spelled('prefix', file)}: it was read with one adapter, or none, and the rows have several; give "
                "them all the same"
            )
        shapes = self.runner.cache.row_shapes(len(read_said(Path(file)).tokens))
        return read_prefix(Path(file), self._identity(adapter), adapter, shapes, self.manifest.graph.vocab_size)

    def verify(self, reference: str | None = None) -> Verification:
        """Check the package's files, and replay its known answer in sessions of its own; or that of `reference`, the
        original model of a folder that Partita did not write.
        """
        check_files(self.folder, self.manifest, hashes=True)
        return verify_with(self.folder, self.manifest, reference, self.target, self.threads, audience=self.audience)

    def evaluate(self) -> Evaluation:
        """Measure the quality of the package on the chain, in a session of its own."""
        check_files(self.folder, self.manifest, hashes=True)
        return evaluate(self.folder, self.manifest, self.target, self.threads, audience=self.audience)

    def close(self) -> None:
        """Free the sessions and everything that belongs to them. May be called twice."""
        with self._lock:
            self._over = self._closed = True
            self._drafters.close()
            self.runner.close()

    def _start(
        self, prefill_chunk: int | None, adapter: str | None, longest: int, *, is_open: bool
    ) -> tuple[Begun, Batch]:
        """A generation with free rows; the one before is over. `longest`: tokens of the longest prompt to come."""
        self._check_open()
        self._over = True
        self.runner.use_adapter(adapter)
        wanted = _chunk(prefill_chunk)
        batch = self._last = Batch(self.runner, wanted, adapter, is_open=is_open)
        self._over = False
        self._gave_up, self._notes = set(), ()
        self._number += 1
        contract, executor = self.manifest.graph, self.runner.executor
        graphs = executor.graphs
        alone = (contract.rereads_at or 0) if executor.takes_rope_length else None
        begun = Begun(
            self._number,
            graphs.chunk_of(wanted, longest),
            graphs.chunk is not None,
            rows=executor.rows,
            max_length=contract.max_length,
            vocab_size=contract.vocab_size,
            rows_apart=True,
            adapters_by_row=contract.adapters_by_row,
            adapters=tuple(record.name for record in self.manifest.switchable),
            rows_rest=executor.rows == 1 or (self.runner.cache.padding_is_safe and alone is None),
            alone_beyond=alone,
            longest=contract.longest,
            model_positions=contract.model_positions,
        )
        return begun, batch

    def _check_open(self) -> None:
        """Raise GenerationError once it is closed, and in a fork of the process that opened it."""
        if self._closed:
            raise GenerationError(CLOSED)
        if os.getpid() != self._process:
            raise GenerationError(FORKED)

    def _current(self, number: int) -> Batch:
        """The batch of the last generation. Raises GenerationError when that is another one, and once it is closed."""
        self._check_open()
        if number != self._number or self._last is None:
            raise GenerationError(ANOTHER)
        return self._last

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chunk(asked: int | None) -> int:
    """Prompt tokens per run, where the graph leaves that open."""
    return PREFILL_CHUNK_TOKENS if asked is None else asked


def _adapter_option(told: str | None) -> dict[str, str]:
    """The adapters of a generation, as a report repeats them."""
    return {} if told is None else {"adapter": told}
