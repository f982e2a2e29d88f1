"""Benchmarks several providers and packages: speed, ratios, and time per part."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import partita
from partita.bench.contenders import Lane, build_contenders, choose_baseline, complete_rounds, sentences, shown_rounds
from partita.bench.records import Bench, RoundResult
from partita.errors import PartitaError, ProviderError, ReportError, UsageError
from partita.library.api import LOGGER, from_fields
from partita.library.bench.entries import (
    Entry,
    read_baseline,
    read_entries,
    read_subjects,
    read_targets,
)
from partita.library.engine.base import ReportRequest
from partita.library.engine.remote import RemoteEngine
from partita.library.model import Model
from partita.library.notes import not_used, unverified_note
from partita.library.report import ViewedRecord
from partita.options.bench import BenchOptions
from partita.partition_reports import storage
from partita.process import peak_rss_bytes

NOT_ALONE = "the packages are open at the same time, in one process each; only one computes at a time"


class BenchResult(ViewedRecord, Bench):
    """The result of a benchmark: the record that `bench --out` writes, with methods.

    `contenders` has the figures or the error of each chain, `verdict` the comparison as text.
    """

    VIEWS = "partita.bench.sections"

    def __repr__(self) -> str:
        return f"<partita.BenchResult: {'; '.join(self.verdict)}>"

    __str__ = __repr__


@from_fields(BenchOptions)
def bench(options: BenchOptions) -> BenchResult:
    """Run the same generation on several chains, in turns, in one process each: medians, ratios, equality of tokens.

    A contender that cannot run is in the result with its error. If none can run, its error is raised, e.g.
    ProviderError. Raises ArgumentError, PackageError, GenerationError and ReportError before anything runs, and
    KeyboardInterrupt.
    """
    race = Race(options)
    for line in race.notes:
        LOGGER.info(line)
    found = race.measure(LOGGER.debug)
    if found.interrupted:
        raise KeyboardInterrupt
    error = race.error()
    if error is not None and not any(each.rounds for each in found.contenders):
        raise error
    return BenchResult.of(found)


PAUSE_SECONDS = 0.5
"""Pause before each turn, because threads of the previous contender spin for a while after its last run."""


@dataclass(slots=True)
class Racer:
    """A contender during the rounds."""

    entry: Entry
    options: BenchOptions
    engine: RemoteEngine | None = None
    model: Model | None = None
    active_providers: tuple[str, ...] = ()
    """Active providers, by ONNX Runtime's names."""
    error: PartitaError | None = None
    lane: Lane = field(init=False)

    def __post_init__(self) -> None:
        """Create the record of its figures."""
        chain = tuple(provider.ort_name for provider in self.entry.target.chain)
        self.lane = Lane(self.entry.name, chain, package=self.entry.subject.name)

    @property
    def alive(self) -> bool:
        """Whether it is open and has not failed."""
        return self.model is not None and self.error is None

    def fail(self, error: PartitaError) -> None:
        """Record the error that ends its turns."""
        self.error, self.lane.error = error, " ".join(str(error).split())

    def open(self, *, observe: bool = False) -> tuple[str, ...]:
        """Load the package in a worker process, and return the active providers, by ONNX Runtime's names.

        Raises the errors of `load`; ProviderError after a timeout.
        """
        subject = self.entry.subject
        self.engine = RemoteEngine(
            subject.path.absolute(),
            subject.manifest,
            self.entry.target,
            subject.choice,
            observe=observe,
            refusal_seconds=0.0,
            load_timeout=self.options.timeout_seconds,
        )
        self.model = Model(self.engine)
        return tuple(entry.provider for entry in self.engine.opened.chain if entry.status == "active")

    def load(self) -> None:
        """Open the package and record the state of its chain."""
        self.active_providers = self.open()
        assert self.engine is not None
        opened, names = self.engine.opened, {provider.ort_name: provider.name for provider in self.entry.target.chain}
        self.lane.load_seconds = opened.load_seconds
        lost = [entry for entry in opened.chain if entry.status != "active"]
        inactive = [not_used(names.get(entry.provider, entry.provider), entry, with_remedy=False) for entry in lost]
        self.lane.unused = (*inactive, *(f"{name} was assigned no nodes" for name in opened.idle_providers))

    def run_round(self, number: int) -> RoundResult:
        """Generate greedily, ignoring stop tokens, and measure it."""
        assert self.model is not None and self.engine is not None
        seconds = self.options.timeout_seconds
        late = threading.Timer(seconds, self.engine.abort, (f"gave no answer within {seconds:g} s",))
        late.daemon = True
        late.start()
        try:
            began = time.perf_counter()
            generation = self.model.generate(
                [list(prompt) for prompt in self.entry.subject.prompts],
                max_new_tokens=self.options.max_new_tokens,
                stop_token_ids=(),
                prefill_chunk=self.options.prefill_chunk,
            )
            times = [began]
            first: float | None = None
            for step in generation:
                times.append(time.perf_counter())
                if first is None and any(step.tokens):
                    first = times[-1] - began
        finally:
            late.cancel()
        took = [after - before for before, after in zip(times, times[1:], strict=False)]
        steps = list(zip(generation.progress.steps, took, strict=True))
        prefill, decode = ([each for each in steps if each[0].phase == phase] for phase in ("prefill", "decode"))
        return RoundResult(
            round=number,
            prefill_ms=tuple(1000 * seconds for _, seconds in prefill),
            prefill_tokens=sum(step.row_tokens for step, _ in prefill),
            decode_ms=tuple(1000 * seconds for _, seconds in decode),
            decode_tokens=sum(step.row_tokens for step, _ in decode),
            decode_outside_ms=1000 * sum(seconds - step.run_seconds for step, seconds in decode),
            first_token_ms=None if first is None else 1000 * first,
            tokens=generation.tokens,
            peak_rss_bytes=peak_rss_bytes(self.engine.process_id),
        )

    def close(self, *, at_once: bool = False) -> None:
        """End its process."""
        if self.engine is not None:
            if at_once:
                self.engine.abort("was interrupted")
            self.engine.close()


class Race:
    """A benchmark with checked options and packages, and its contenders."""

    def __init__(self, options: BenchOptions) -> None:
        """Check options and packages. Raises UsageError, PackageError, ReportError and GenerationError."""
        if options.prompt is not None and options.prompt_tokens is not None:
            raise UsageError(
                "`prompt` and `prompt_tokens`: set one of them; the second is the length of a generated prompt"
            )
        targets = None if options.chains is None else read_targets(options)
        self.options, self.subjects = options, read_subjects(options)
        self.entries = read_entries(options, self.subjects, targets or read_targets(options))
        self.baseline = read_baseline(options, self.entries)
        self.racers = [Racer(entry, options) for entry in self.entries]
        self.notes = tuple(dict.fromkeys(line for entry in self.entries for line in entry.target.opening_notes))
        """Notes for the user before the run."""

    def measure(self, report_progress: Callable[[str], object]) -> Bench:
        """The record of a finished or interrupted benchmark. Raises KeyboardInterrupt if no turn was counted yet."""
        interrupted = True
        try:
            self._run(report_progress)
            interrupted = False
        except KeyboardInterrupt:
            if not shown_rounds([racer.lane for racer in self.racers]):
                raise
            for lane in (racer.lane for racer in self.racers):
                if lane.observed is None and not lane.report_missing_reason:
                    lane.report_missing_reason = "interrupted before its profiled round"
        finally:
            for racer in self.racers:
                racer.close(at_once=interrupted)
        return self._record(interrupted=interrupted)

    def _run(self, report_progress: Callable[[str], object]) -> None:
        """Open each package, run a warm-up round and the rounds, each beginning with another contender, and observe."""
        rounds = self.options.rounds
        for racer in self.racers:
            report_progress(f"opening on {racer.entry.name}")
            try:
                racer.load()
            except PartitaError as error:
                racer.fail(error)
        for number in range(rounds + 1):
            turn = number % len(self.racers)
            for racer in self.racers[turn:] + self.racers[:turn]:
                if racer.alive:
                    title = f"round {number} of {rounds}" if number else "warm-up"
                    report_progress(f"{title}: {racer.entry.name}")
                    self.run_round(racer, number)
        for racer in filter(lambda racer: racer.alive, self.racers):
            report_progress(f"observing {racer.entry.name}")
            # In a new process: the OpenVINO plugin does not start again after its first session is closed.
            racer.close()
            try:
                self.observe(racer)
            except PartitaError as error:  # does not change the figures
                racer.lane.report_missing_reason = f"the profiled round failed: {' '.join(str(error).split())}"

    def run_round(self, racer: Racer, number: int) -> None:
        """Run one generation of one contender."""
        time.sleep(PAUSE_SECONDS)
        try:
            racer.lane.round_results += (racer.run_round(number),)
        except PartitaError as error:
            racer.fail(error)

    def observe(self, racer: Racer) -> None:
        """Store and write the report of a profiled generation, if it ran on the measured providers."""
        used = racer.open(observe=True)
        assert racer.engine is not None
        if used != racer.active_providers:
            racer.lane.report_missing_reason = (
                f"the profiled round ran on {','.join(used)}, not on {','.join(racer.active_providers)}"
            )
            return
        racer.run_round(0)
        report = racer.engine.report(ReportRequest())
        report = report.model_copy(update={"request": report.request.model_copy(update={"verb": "bench"})})
        if racer.entry.report is not None:
            storage.write(report, racer.entry.report.resolve())
            racer.lane.file = str(racer.entry.report)
        racer.lane.observed = report

    def _record(self, *, interrupted: bool) -> Bench:
        """The record of the benchmark."""
        from partita.runtime.chain.advice import package_facts
        from partita.runtime.machine import environment

        options, lanes = self.options, [racer.lane for racer in self.racers]
        baseline = choose_baseline(lanes, self.baseline)
        contenders = build_contenders(lanes, baseline)
        notes = [NOT_ALONE] if len(lanes) > 1 else []
        if self.baseline is not None and self.baseline != baseline:
            instead = f"; using {baseline} instead" if baseline else ""
            notes.append(f"`baseline={self.baseline}` was not measured{instead}")
        if interrupted:
            complete = len(complete_rounds(lanes))
            partly = "" if complete else "; figures are from the incomplete first round"
            notes.append(f"interrupted: {complete} of {options.rounds} rounds are complete{partly}")
        for subject in self.subjects:
            name = "this package" if len(self.subjects) == 1 else subject.name
            notes += unverified_note(subject.manifest.verification, name)
        package, *others = (package_facts(subject.path, subject.manifest) for subject in self.subjects)
        return Bench(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            partita_version=partita.__version__,
            verdict=sentences(contenders, baseline),
            environment=environment() if any(lane.load_seconds is not None for lane in lanes) else None,
            package=package,
            other_packages=tuple(others),
            prompt_tokens=len(self.subjects[0].prompts[0]),
            max_new_tokens=options.max_new_tokens,
            threads=options.threads,
            rounds=options.rounds,
            interrupted=interrupted,
            baseline=baseline,
            contenders=contenders,
            notes=tuple(notes),
        )

    def error(self) -> PartitaError | None:
        """One error for all contenders that could not run, with the class and nodes of the first; else for reports that
        could not be written.
        """
        failed = {racer.entry.name: racer.error for racer in self.racers if racer.error is not None}
        if failed:
            first, text = next(iter(failed.values())), "; ".join(f"{name}: {error}" for name, error in failed.items())
            return ProviderError(text, nodes=first.nodes) if isinstance(first, ProviderError) else type(first)(text)
        missing = [
            f"{racer.entry.report}: not written: {racer.lane.report_missing_reason}"
            for racer in self.racers
            if racer.entry.report is not None and racer.lane.observed is None
        ]
        return ReportError("; ".join(missing)) if missing else None
