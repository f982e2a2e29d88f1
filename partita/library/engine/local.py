"""A package loaded in this process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from partita.check.requirements import Limits
from partita.errors import GenerationError, ReportError, UsageError
from partita.foreign.folder import NO_CHOICE, Choice, open_folder
from partita.library.api import QUIET, Audience
from partita.library.chain import Target
from partita.library.engine.base import BUSY, OpenedPackage, PrefixSaved, ReportRequest
from partita.library.engine.requests import speculation_fact
from partita.library.engine.scheduler import Scheduler, chunk_tokens
from partita.library.place.probing import REFUSAL_SECONDS, package_refused, probe_package
from partita.library.run_report import option_texts
from partita.observations.facts import RunFacts
from partita.observations.records import ChainEntry, Environment
from partita.options.fields import PathText
from partita.options.generation import BatchOptions, SpeculationOptions
from partita.package.folder import Manifest
from partita.partition_reports.records import Report
from partita.partition_reports.request_records import Request as Asked
from partita.runtime.chain.open_chain import ChainError, chain_entry, idle_providers
from partita.runtime.chain.pins import parse_pins
from partita.runtime.generate.choice.drafting import (
    DraftLength,
    DraftLengths,
    DraftModel,
    NgramDrafter,
    no_draft_reason,
    no_speculation_reason,
)
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.prefix_file import PrefixContent, identity, read_content, read_prefix, write_prefix
from partita.runtime.generate.record.run_facts import run_facts, with_optimised
from partita.runtime.generate.request import Drafter, Prefix, Request
from partita.runtime.generate.runner import Runner, load_runner
from partita.runtime.machine import environment
from partita.runtime.ort.errors import NoKernelError


class LocalEngine(Scheduler):
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
        self._choice, self.audience = choice, audience
        self._recorded: BatchOptions | None = None
        """Options of the recorded requests."""
        self._identities: dict[str | None, str] = {}
        self._prefixes: dict[tuple[Path, str | None], Prefix] = {}
        """The last prefix by file and adapter, so that a reopened batch needs no file."""
        try:
            runner = load_runner(
                folder,
                target.chain,
                threads=target.threads,
                observe=observe,
                manifest=manifest,
                options=target.options,
                pins=parse_pins(target.pins, target.chain),
            )
        except (ChainError, NoKernelError) as error:
            raise package_refused(error, refusal_seconds, audience) from error
        super().__init__(folder, manifest, target, runner)
        self._drafters = Drafters(folder, target)
        self._closing = weakref.finalize(self, _free, runner, self._drafters, self._process)
        graphs = runner.graphs
        self.opened = OpenedPackage(
            chain=(*target.skipped, *map(chain_entry, runner.resolutions)),
            idle_providers=tuple(
                sorted({name for entry in graphs for name in idle_providers(entry.session, entry.model)})
            ),
            load_seconds=sum(entry.session.load_seconds for entry in graphs),
            slots=runner.rows,
            notes=tuple(note for entry in graphs for note in entry.session.notes),
        )

    def report(self, request: ReportRequest) -> Report:
        """The partition report of the steps since `open`. Raises ReportError without steps."""
        return self._make_report(*self.report_facts(request))

    def report_facts(
        self, request: ReportRequest
    ) -> tuple[RunFacts, tuple[str, ...], tuple[ChainEntry, ...], Environment, Asked, Limits]:
        """The data of the report. Steps wait while it is collected, but not while the report is built."""
        with self._stepping:
            last, runner = self._recorded, self.runner
            if last is None:
                raise ReportError("nothing to report: nothing has been generated yet")
            if not runner.steps:
                raise ReportError("nothing to report: no request has been answered yet")
            facts = run_facts(
                runner,
                speculation=speculation_fact(last),
                finish_reason=request.finish_reason,
                finish_detail=request.finish_detail,
                tokenizer_load_seconds=request.tokenizer_load_seconds,
                notes=request.notes,
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
                prefill_chunk_tokens=runner.capacity.chunk_of(chunk_tokens(last), recorder.longest),
            )
            seconds = request.probe_seconds
            alone = replace(facts, notes=())
            probed, chain = probe_package(alone, runner.resolutions, self.folder, seconds, self.audience)
            entries = (*self.target.skipped, *map(chain_entry, chain))
            facts = replace(probed, notes=facts.notes)
            return facts, probed.notes, entries, environment(), requested, request.limits

    def save_prefix(self, prefix: PrefixContent, file: str, prefill_chunk: int | None = None) -> PrefixSaved:
        """Prefill a prefix and write its states to a file; see `Engine.save_prefix`."""
        with self._stepping:
            self.check_open()
            self._end_cancelled()
            if self.running or self.waiting:
                raise GenerationError(BUSY)
            loop = self._open_batch(BatchOptions(prefill_chunk=prefill_chunk, adapter=prefix.adapter))
            self._recorded = self._batch = None
            row, seconds = loop.add_request(Request(prefix.tokens)), 0.0
            while (step := loop.step()) is not None:
                seconds += step.run_seconds
            size = write_prefix(Path(file), loop.save_prefix(row), prefix, self._identity(prefix.adapter))
            return PrefixSaved(len(prefix.tokens), size, seconds)

    def _close(self) -> None:
        super()._close()
        with self._stepping:
            self._closing()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open_batch(self, options: BatchOptions) -> GenerationLoop:
        """A batch with free rows, and a new record."""
        prefix = None if options.prefix is None else self._prefix(Path(options.prefix), options.adapter)
        self.runner.use_adapters(options.adapter)
        chunk = chunk_tokens(options)
        loop = GenerationLoop(self.runner, chunk, shares=True, patience=chunk, records=True)
        loop.new_drafter, loop.control = self._drafters.drafting(self.runner, options)
        if prefix is not None:
            loop.add_prefix(prefix)
        self.runner.begin()
        self._recorded = options
        return loop

    def _identity(self, adapter: str | None) -> str:
        """The hash of the package with an adapter, for prefixes; computed once from its files."""
        if adapter not in self._identities:
            self._identities[adapter] = identity(self.folder, self.manifest, self.runner.graphs, adapter)
        return self._identities[adapter]

    def _prefix(self, file: Path, adapter: str | None) -> Prefix:
        """The prefix in a file for this adapter. Raises GenerationError for a prefix of another package."""
        if (file, adapter) not in self._prefixes:
            shapes = self.runner.cache.row_shapes(len(read_content(file).tokens))
            found = read_prefix(file, self._identity(adapter), adapter, shapes)
            self._prefixes = {(file, adapter): replace(found, adapter=adapter)}
        return self._prefixes[file, adapter]


def _free(runner: Runner, drafters: Drafters, process: int) -> None:
    """Free the sessions, unless this process is a fork."""
    if os.getpid() == process:
        drafters.close()
        runner.close()


Drafting = tuple[Callable[[], Drafter] | None, DraftLengths | None]


class Drafters:
    """Drafters for one loaded package. Measured times and acceptance rates are kept for later requests."""

    def __init__(self, folder: Path, target: Target) -> None:
        self._folder, self._target = folder, target
        self._lengths: dict[PathText | None, DraftLengths] = {}
        self._drafts: dict[PathText, Runner] = {}

    def drafting(self, runner: Runner, options: SpeculationOptions) -> Drafting:
        """The drafter factory and its control; None and None without speculative decoding.

        Raises UsageError when the package cannot verify draft tokens or the draft package cannot be used; PackageError,
        ProviderError and ResourceError when the draft package does not open.
        """
        given = options.speculation_texts()
        if not given:
            return None, None
        reason = no_speculation_reason(runner)
        if reason is not None:
            ((name, value),) = given.items()
            raise UsageError(f"`{name}={value}`: {self._folder} cannot verify draft tokens: {reason}")
        control = self._lengths.setdefault(options.draft, DraftLengths(DraftLength))
        if options.draft is None:
            return NgramDrafter, control
        draft, vocab_size = self._draft(options.draft), runner.contract.vocab_size
        return partial(DraftModel, draft, vocab_size), control

    def close(self) -> None:
        """Close the draft packages. May be called repeatedly."""
        while self._drafts:
            self._drafts.popitem()[1].close()

    def _draft_options(self) -> Mapping[str, Mapping[str, str]]:
        """The package's provider options, adjusted for two packages that alternate."""
        options = self._target.options
        turns = {
            provider.name: provider.alternating_options
            for provider in self._target.chain
            if provider.alternating_options
        }
        return {**options, **{name: {**suits, **options.get(name, {})} for name, suits in turns.items()}}

    def _draft(self, path: PathText) -> Runner:
        """The draft package, opened on the package's chain."""
        if path in self._drafts:
            return self._drafts[path]
        folder = Path(path)
        manifest = open_folder(folder, NO_CHOICE)
        try:
            runner = load_runner(
                folder,
                self._target.chain,
                threads=self._target.threads,
                manifest=manifest,
                options=self._draft_options(),
            )
        except (ChainError, NoKernelError) as error:
            raise package_refused(error, 0.0) from error
        reason = no_draft_reason(runner)
        if reason is not None:
            runner.close()
            raise UsageError(f"`draft={path}`: this package cannot be a draft package: {reason}")
        self._drafts[path] = runner
        return runner
