"""Benchmarks several providers and packages: contenders, speed, ratios, and time per part."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import partita
from partita.bench.contenders import Lane, build_contenders, choose_baseline, complete_rounds, sentences, shown_rounds
from partita.bench.records import Bench, RoundResult
from partita.errors import GenerationError, PartitaError, ProviderError, ReportError, UsageError
from partita.files import refuse_same, reserve
from partita.foreign.folder import NO_CHOICE, Choice, is_foreign, open_folder
from partita.library.api import LOGGER, from_fields
from partita.library.chain import Target, not_used, read_chains
from partita.library.engine.base import ReportRequest
from partita.library.engine.remote import RemoteEngine
from partita.library.engine.requests import prompt_rows
from partita.library.loading import unverified_note
from partita.library.model import Model
from partita.library.report import ViewedRecord
from partita.observations.text_format import plural
from partita.options.fields import input_paths
from partita.options.inspection import BenchOptions
from partita.package.folder import Manifest, check_files
from partita.partition_reports import storage
from partita.process import peak_rss_bytes
from partita.providers.options import parse_libraries
from partita.providers.resolve import all_names, parse_chain
from partita.runtime.generate.checks import check_prompt

NOT_ALONE = "the packages are open at the same time, in one process each; only one computes at a time"
PAUSE_SECONDS = 0.5
"""Pause before each turn, because threads of the previous contender spin for a while after its last run."""
PROMPT_TOKENS = 64
"""Default length of a generated prompt in tokens."""


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


@dataclass(frozen=True, slots=True)
class Subject:
    """A package of a benchmark, read once for all its contenders."""

    path: Path
    name: str
    """Name of its folder; the path as given if two folders have the same name."""
    manifest: Manifest
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each row."""
    choice: Choice = NO_CHOICE
    """The user's choices about a foreign folder."""


@dataclass(slots=True, kw_only=True)
class Racer(Lane):
    """A contender: a package on a chain, its figures, and its state during the rounds."""

    subject: Subject
    target: Target
    options: BenchOptions
    report: Path | None = None
    """File of its partition report."""
    engine: RemoteEngine | None = None
    model: Model | None = None
    failure: PartitaError | None = None
    """The error that ended its turns."""

    @property
    def alive(self) -> bool:
        """Whether it is open and has not failed."""
        return self.model is not None and self.failure is None

    def fail(self, error: PartitaError) -> None:
        """Record the error that ends its turns."""
        self.failure, self.error = error, " ".join(str(error).split())

    def open(self, *, observe: bool = False) -> RemoteEngine:
        """Load the package in a worker process. Raises the errors of `load`; ProviderError after a timeout."""
        subject = self.subject
        self.engine = RemoteEngine(
            subject.path.absolute(),
            subject.manifest,
            self.target,
            subject.choice,
            observe=observe,
            refusal_seconds=0.0,
            load_timeout=self.options.timeout_seconds,
        )
        self.model = Model(self.engine)
        return self.engine

    def load(self) -> None:
        """Open the package and record the state of its chain."""
        opened, names = self.open().opened, {provider.ort_name: provider.name for provider in self.target.chain}
        self.load_seconds = opened.load_seconds
        unused = [
            not_used(names.get(entry.provider, entry.provider), entry, with_remedy=False)
            for entry in opened.chain
            if entry.status != "active"
        ]
        self.unused_providers = (*unused, *(f"{name} was assigned no nodes" for name in opened.idle_providers))

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
                [list(prompt) for prompt in self.subject.prompts],
                max_new_tokens=self.options.max_new_tokens,
                stop_token_ids=(),
                prefill_chunk=self.options.prefill_chunk,
            )
            first: float | None = None
            for step in generation:
                if first is None and any(step.tokens):
                    first = time.perf_counter() - began
        finally:
            late.cancel()
        # By the clock of the process that runs them, which sends short steps together.
        steps = generation.progress.steps
        prefill, decode = ([step for step in steps if step.phase == phase] for phase in ("prefill", "decode"))
        return RoundResult(
            round=number,
            prefill_ms=tuple(1000 * (step.run_seconds + step.overhead_seconds) for step in prefill),
            prefill_tokens=sum(step.row_tokens for step in prefill),
            decode_ms=tuple(1000 * (step.run_seconds + step.overhead_seconds) for step in decode),
            decode_tokens=sum(step.row_tokens for step in decode),
            decode_outside_ms=1000 * sum(step.overhead_seconds for step in decode),
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
        targets = None if options.chains is None else read_chains(options)  # before the packages are read
        self.options, self.subjects = options, read_subjects(options)
        self.racers = read_racers(options, self.subjects, targets or read_chains(options))
        self.baseline = read_baseline(options, self.racers)
        self.notes = tuple(dict.fromkeys(line for racer in self.racers for line in racer.target.opening_notes))
        """Notes for the user before the run."""

    def measure(self, report_progress: Callable[[str], object]) -> Bench:
        """The record of a finished or interrupted benchmark. Raises KeyboardInterrupt if no turn was counted yet."""
        interrupted = True
        try:
            self._run(report_progress)
            interrupted = False
        except KeyboardInterrupt:
            if not shown_rounds(self.racers):
                raise
            for racer in self.racers:
                if racer.observed is None and not racer.summary_missing_reason:
                    racer.summary_missing_reason = "interrupted before its profiled round"
        finally:
            for racer in self.racers:
                racer.close(at_once=interrupted)
        return self._record(interrupted=interrupted)

    def _run(self, report_progress: Callable[[str], object]) -> None:
        """Open each package, run a warm-up round and the rounds, each beginning with another contender, and observe."""
        rounds = self.options.rounds
        for racer in self.racers:
            report_progress(f"opening on {racer.name}")
            try:
                racer.load()
            except PartitaError as error:
                racer.fail(error)
        for number in range(rounds + 1):
            turn = number % len(self.racers)
            for racer in self.racers[turn:] + self.racers[:turn]:
                if racer.alive:
                    title = f"round {number} of {rounds}" if number else "warm-up"
                    report_progress(f"{title}: {racer.name}")
                    self.run_round(racer, number)
        for racer in filter(lambda racer: racer.alive, self.racers):
            report_progress(f"observing {racer.name}")
            # In a new process: the OpenVINO plugin does not start again after its first session is closed.
            racer.close()
            try:
                self.observe(racer)
            except PartitaError as error:  # does not change the figures
                racer.summary_missing_reason = f"the profiled round failed: {' '.join(str(error).split())}"

    def run_round(self, racer: Racer, number: int) -> None:
        """Run one generation of one contender."""
        time.sleep(PAUSE_SECONDS)
        try:
            racer.round_results += (racer.run_round(number),)
        except PartitaError as error:
            racer.fail(error)

    def observe(self, racer: Racer) -> None:
        """Store and write the report of a profiled generation."""
        engine = racer.open(observe=True)
        racer.run_round(0)
        report = engine.report(ReportRequest())
        report = report.model_copy(update={"request": report.request.model_copy(update={"verb": "bench"})})
        if racer.report is not None:
            storage.write(report, racer.report.resolve())
            racer.file = str(racer.report)
        racer.observed = report

    def _record(self, *, interrupted: bool) -> Bench:
        """The record of the benchmark."""
        from partita.runtime.chain.advice import package_facts
        from partita.runtime.machine import environment

        options, lanes = self.options, self.racers
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
        failed = {racer.name: racer.failure for racer in self.racers if racer.failure is not None}
        if failed:
            first, text = next(iter(failed.values())), "; ".join(f"{name}: {error}" for name, error in failed.items())
            return ProviderError(text, nodes=first.nodes) if isinstance(first, ProviderError) else type(first)(text)
        missing = [
            f"{racer.report}: not written: {racer.summary_missing_reason}"
            for racer in self.racers
            if racer.report is not None and racer.observed is None
        ]
        return ReportError("; ".join(missing)) if missing else None


def read_racers(options: BenchOptions, subjects: Sequence[Subject], targets: Sequence[Target]) -> list[Racer]:
    """Every package on every chain, with the files of their reports, whose folder is created. Raises ReportError."""
    pairs = [(subject, target) for subject in subjects for target in targets]
    names = [target.name for _, target in pairs]
    stems = [name.replace(",", "-") for name in names]
    if len(subjects) > 1:
        names = [f"{subject.name} on {name}" for (subject, _), name in zip(pairs, names, strict=True)]
        stems = [f"{subject.path.resolve().name}-{stem}" for (subject, _), stem in zip(pairs, stems, strict=True)]
    racers = [
        Racer(name, target.ort_names, package=subject.name, subject=subject, target=target, options=options)
        for name, (subject, target) in zip(names, pairs, strict=True)
    ]
    if options.reports is None:
        return racers
    folder, reads = Path(options.reports), input_paths(options)
    for read in reads:
        refuse_same(folder, read, "`reports`")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        message = f"cannot be created: {error.strerror}; choose a folder for the reports"
        raise ReportError(message, path=folder) from error
    for number, (racer, stem) in enumerate(zip(racers, stems, strict=True), start=1):
        racer.report = folder / (f"{stem}.json" if stems.count(stem) == 1 else f"{stem}-{number}.json")
        reserve(racer.report, "report", reads, option="`reports`")
    return racers


def read_baseline(options: BenchOptions, racers: Sequence[Racer]) -> str | None:
    """Name of the baseline contender, of the first package. Raises UsageError if it matches none."""
    if options.baseline is None:
        return None
    libraries = parse_libraries(options.provider_libraries or {}, all_names())
    chain = parse_chain(options.baseline, libraries, argument="baseline")
    first = [racer for racer in racers if racer.subject is racers[0].subject]
    for racer in first:
        if racer.target.chain == chain:
            return racer.name
    there = " ".join(racer.target.name for racer in first)
    raise UsageError(f"`baseline={options.baseline}`: not among the measured chains: {there}")


def read_subjects(options: BenchOptions) -> tuple[Subject, ...]:
    """The packages, each with the prompt for its rows. Raises PackageError, UsageError and GenerationError."""
    packages, choice = (Path(options.package), *map(Path, options.against)), Choice.of(options)
    if len(set(packages)) < len(packages):
        raise UsageError("`against`: a package is listed twice; list each once")
    foreign = [is_foreign(path) for path in packages]
    choices = [choice if theirs or not any(foreign) else NO_CHOICE for theirs in foreign]
    manifests = [open_folder(*each) for each in zip(packages, choices, strict=True)]
    for each in zip(packages, manifests, strict=True):
        check_files(*each, hashes=False)
    sizes = {manifest.graph.vocab_size for manifest in manifests}
    if len(sizes) > 1:
        counts = ", ".join(f"{size:,}" for size in sorted(sizes))
        raise UsageError(f"`against`: vocabularies of {counts} tokens; only packages of one model can be compared")
    prompt, folders = _read_prompt(options, packages, manifests), [path.resolve().name for path in packages]
    names = [name if folders.count(name) == 1 else str(path) for name, path in zip(folders, packages, strict=True)]
    return tuple(
        Subject(path, name, manifest, (prompt,) * manifest.graph.batch_size, choice)
        for path, name, manifest, choice in zip(packages, names, manifests, choices, strict=True)
    )


def _read_prompt(options: BenchOptions, packages: Sequence[Path], manifests: Sequence[Manifest]) -> tuple[int, ...]:
    """The prompt as token ids, the same for every package. Raises UsageError and GenerationError."""
    longest = min(manifest.graph.max_length for manifest in manifests)
    if options.prompt is None:
        length = options.prompt_tokens or min(PROMPT_TOKENS, max(longest - options.max_new_tokens, 1))
        ids = tuple((7 + 31 * position) % manifests[0].graph.vocab_size for position in range(length))
    else:
        rows = prompt_rows(options.prompt)
        if len(rows) != 1:
            raise UsageError(f"`prompt` has {len(rows)} prompts; pass one, which is used for every row of the batch")
        ids, *others = (_encode(*each, rows[0]) for each in zip(packages, manifests, strict=True))
        if any(other != ids for other in others):
            raise UsageError("`against`: the packages tokenize `prompt` differently; pass token ids")
        check_prompt(ids, manifests[0].graph, "the prompt")
    if len(ids) + options.max_new_tokens > longest:
        raise GenerationError(
            f"a prompt of {plural(len(ids), 'token')} and `max_new_tokens={options.max_new_tokens}` exceed the cache "
            f"length of {longest} of this package; reduce one of them"
        )
    return ids


def _encode(package: Path, manifest: Manifest, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """Token ids of the user's prompt, with one package's tokenizer."""
    if not isinstance(prompt, str):
        return prompt
    from partita.runtime.generate.text.tokens import load_text

    text = load_text(package, manifest.tokenizer, manifest.graph.max_length)
    return tuple(text.encode(prompt)) if prompt else ()
