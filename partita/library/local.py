"""A package loaded in this process."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Self

from partita.errors import GenerationError
from partita.export.progress import Silent
from partita.library.audience import QUIET, Audience
from partita.library.chain import Target
from partita.library.engine import Begun, GenerateRequest, Opened, ReportRequest
from partita.library.evaluating import evaluate
from partita.library.probing import REFUSAL_SECONDS, package_refused, probe_package
from partita.library.run_report import Asked, make_report
from partita.library.speculating import Speculators
from partita.library.verifying import verify_with
from partita.package import Manifest, check_files
from partita.package_records import Verification
from partita.partition_reports.records import Report
from partita.runtime.chain import ChainError, chain_entry, idle_providers
from partita.runtime.engine.checks import check_requests
from partita.runtime.engine.loop import PREFILL_CHUNK_TOKENS, serve
from partita.runtime.engine.recorder import Step
from partita.runtime.engine.request import Request
from partita.runtime.evaluation import Evaluation
from partita.runtime.optimised import with_optimised
from partita.runtime.ort.errors import NoKernelError
from partita.runtime.pins import parse_pins
from partita.runtime.run_facts import run_facts
from partita.runtime.runner import load_runner


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
    ) -> None:
        """Open the package. Raises PackageError, ResourceError, UsageError; ProviderError when the chain cannot be
        honoured, with what experiments of `refusal_seconds` tell.
        """
        self.folder, self.manifest, self.target, self.threads = folder, manifest, target, threads
        self.audience = audience
        self._lock = threading.RLock()
        self._loop: Generator[Step, None, None] | None = None
        self._number, self._request = 0, GenerateRequest(())
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
        self._speculators = Speculators(folder, target, threads)
        graphs = self.runner.graphs
        self.opened = Opened(
            chain=tuple(chain_entry(entry) for entry in self.runner.resolutions),
            idle=tuple(sorted({name for entry in graphs for name in idle_providers(entry.session, entry.model)})),
            load_seconds=sum(entry.session.load_seconds for entry in graphs),
        )

    def begin(self, request: GenerateRequest) -> Begun:
        """Begin a generation; one that was going on is over. Raises GenerationError for prompts, UsageError."""
        wanted = PREFILL_CHUNK_TOKENS if request.prefill_chunk is None else request.prefill_chunk
        stops = frozenset(request.stop_ids)
        shared = request.rows[0].sampling.sampler() if request.one_sampler and request.rows else None
        with self._lock:
            executor = self.runner.executor
            guessers = self._speculators.guessers(executor, request.speculation)
            requests = [
                Request(
                    row.prompt,
                    shared or row.sampling.sampler(),
                    row.sampling.max_new_tokens or 0,
                    stops,
                    guesser=None if guessers is None else guessers.guesser(),
                )
                for row in request.rows
            ]
            check_requests(executor, requests, wanted)
            self._end()
            self.runner.use_adapter(request.adapter)
            self._number += 1
            self._request = request
            self._loop = serve(
                executor,
                requests,
                prefill_chunk=wanted,
                observers=(self.runner,),
                governor=None if guessers is None else guessers.governor,
            )
            graphs = executor.graphs
            return Begun(self._number, graphs.chunk_of(wanted, request.longest), graphs.chunk is not None)

    def step(self, number: int) -> Step | None:
        """The next step of the generation; None when it is over. Raises what `runtime.generate` does."""
        with self._lock:
            if number != self._number:
                raise GenerationError(
                    "another generation of this model has begun since, and only one runs at a time; load the "
                    "package again to run two at once"
                )
            return None if self._loop is None else next(self._loop, None)

    def report(self, request: ReportRequest) -> Report:
        """The report of the last generation."""
        with self._lock:
            self._end()
            runner, last = self.runner, self._request
            wanted = PREFILL_CHUNK_TOKENS if last.prefill_chunk is None else last.prefill_chunk
            facts = run_facts(
                runner,
                speculation=last.speculation.fact(),
                finish_reason=request.finish_reason,
                finish_detail=request.finish_detail,
                tokenizer_load_seconds=request.tokenizer_load_seconds,
                notes=request.notes,
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
                    **_adapter_option(last),
                    **last.speculation.told,
                    **_where_options(self.target),
                },
                threads=self.threads,
                prompt_tokens=last.longest,
                max_new_tokens=last.max_new_tokens,
                limits=request.limits,
                prefill_chunk_tokens=runner.executor.graphs.chunk_of(wanted, last.longest),
            )
            seconds = request.probe_seconds
            facts, chain = probe_package(facts, runner.resolutions, self.folder, seconds, self.audience)
            return make_report(self.folder, self.manifest, facts, chain, asked)

    def verify(self, reference: str | None = None) -> Verification:
        """Check the package's files, and replay its known answer in sessions of its own; or that of `reference`, the
        original model of a folder that Partita did not write.
        """
        check_files(self.folder, self.manifest, hashes=True)
        return verify_with(self.folder, self.manifest, reference, self.target, self.threads, audience=self.audience)

    def evaluate(self) -> Evaluation:
        """Measure the quality of the package on the chain, in a session of its own."""
        check_files(self.folder, self.manifest, hashes=True)
        silent = Silent()
        return evaluate(self.folder, self.manifest, self.target, self.threads, progress=silent, audience=self.audience)

    def close(self) -> None:
        """Free the sessions and everything that belongs to them. May be called twice."""
        with self._lock:
            self._end()
            self._speculators.close()
            self.runner.close()

    def _end(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _adapter_option(request: GenerateRequest) -> dict[str, str]:
    """The adapter of a generation, as a report repeats it."""
    return {} if request.adapter is None else {"adapter": request.adapter}


def _where_options(target: Target) -> dict[str, str]:
    """What was said of providers, as a report repeats it."""
    given = {f"{name}.{key}": value for name, pairs in target.options.items() for key, value in pairs.items()}
    return {**given, **({"pin": ", ".join(target.pins)} if target.pins else {})}
