"""`partita bench`: one prompt on several providers, interleaved; medians, ratios, and where the time goes.

Figures are printed first; what then ends the command is a contender that could not run, or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import partita
from partita.bench.contenders import build_contenders, choose_baseline, complete_rounds, shown_rounds
from partita.bench.records import Bench
from partita.bench.verdict import judge
from partita.bench.words import sentences
from partita.commands.bench_child import Task
from partita.commands.bench_entries import (
    Entry,
    check_providers,
    default_chain,
    named_chains,
    read_baseline,
    read_entries,
    read_paths,
    report_files,
)
from partita.commands.bench_options import BenchOptions, check_options
from partita.commands.bench_rounds import Race, Racer, Say
from partita.commands.bench_subjects import Subject, read_subjects
from partita.commands.outputs import Sink, Stdout, claim_output, say_written
from partita.commands.terminal import note, stderr, stdout_console, write_stdout
from partita.errors import INTERRUPTED, PartitaError, ProviderError
from partita.files import Output, temporary_directory
from partita.library.notes import unverified

NOT_ALONE = "the packages are open at the same time, one process each; only one computes at a time"


def run(options: BenchOptions) -> int:
    """Measure, print, and return the exit code.

    Raises UsageError, PackageError, ReportError and GenerationError before anything runs; afterwards the error of a
    contender that failed, and KeyboardInterrupt when not one round was complete.
    """
    check_options(options)
    named = named_chains(options)
    subjects = read_subjects(options)
    chains = named or (default_chain(options),)
    check_providers(options, chains)
    entries = read_entries(options, subjects, chains)
    baseline = read_baseline(options.baseline, entries, options.provider_libraries)
    reads = read_paths(options, entries)
    sink = claim_output(options.out, "result", reads, option="--out") if options.out is not None else None
    files = report_files(options, entries)
    for line in dict.fromkeys(line for entry in entries for line in entry.notes):
        note(f"note: {line}")
    work = {entry.name: _task_of(options, entry.subject) for entry in entries}
    racers, interrupted = _race(options, entries, work, files)
    bench = build(options, subjects, racers, files, baseline, interrupted=interrupted)
    return _finish(options, bench, racers, sink)


def _task_of(options: BenchOptions, subject: Subject) -> Task:
    """What is done with one package."""
    return Task(str(subject.path.resolve()), subject.prompts, options.max_new_tokens, options.prefill_chunk)


def _race(
    options: BenchOptions, entries: Sequence[Entry], work: Mapping[str, Task], files: dict[str, Path]
) -> tuple[list[Racer], bool]:
    """The rounds; and whether Ctrl-C ended them. Raises KeyboardInterrupt when it did before anything was measured."""
    with temporary_directory() as folder, saying() as say:
        contest = Race(entries, work, Path(folder), options.timeout_seconds, say)
        try:
            with contest:
                contest.load()
                contest.run(options.rounds)
                contest.observe(files)
        except KeyboardInterrupt:
            if not shown_rounds([racer.lane(None) for racer in contest.racers]):
                raise
            for racer in contest.racers:
                racer.why_unknown = racer.why_unknown or "interrupted before it was observed"
            return contest.racers, True
        return contest.racers, False


@contextlib.contextmanager
def saying() -> Iterator[Say]:
    """A line on the terminal that says what goes on; nothing elsewhere."""
    if not stderr.is_terminal:
        yield lambda text: None
        return
    with stderr.status("") as status:
        yield status.update


def build(
    options: BenchOptions,
    subjects: Sequence[Subject],
    racers: Sequence[Racer],
    files: dict[str, Path],
    asked: str | None,
    *,
    interrupted: bool,
) -> Bench:
    """The record of a bench."""
    from partita.runtime.advice import package_facts

    lanes = [racer.lane(files.get(racer.entry.name)) for racer in racers]
    baseline = choose_baseline(lanes, asked)
    contenders = build_contenders(lanes, baseline)
    notes = [NOT_ALONE] if len(lanes) > 1 else []
    if asked is not None and asked != baseline:
        notes.append(f"--baseline {asked} was not measured" + (f"; {baseline} takes its place" if baseline else ""))
    if interrupted:
        complete = len(complete_rounds(lanes))
        partly = "" if complete else "; the figures are of the first one, as far as it got"
        notes.append(f"interrupted: {complete} of {options.rounds} rounds are complete{partly}")
    for subject in subjects:
        which = "this package" if len(subjects) == 1 else subject.name
        notes += unverified(subject.manifest.verification, which)
    verdicts = judge(contenders, baseline)
    package, *others = (package_facts(subject.path, subject.manifest) for subject in subjects)
    return Bench(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        partita_version=partita.__version__,
        verdict=sentences(verdicts, contenders),
        verdicts=verdicts,
        environment=next((found for racer in racers if (found := racer.environment()) is not None), None),
        package=package,
        others=tuple(others),
        prompt_tokens=len(subjects[0].prompts[0]),
        max_new_tokens=options.max_new_tokens,
        threads=options.threads,
        rounds=options.rounds,
        interrupted=interrupted,
        baseline=baseline,
        contenders=contenders,
        notes=tuple(notes),
    )


def _finish(options: BenchOptions, bench: Bench, racers: Sequence[Racer], sink: Sink | None) -> int:
    """Print and write, then raise what went wrong, else return the exit code."""
    failed = [racer for racer in racers if racer.error is not None]
    if any(entry.rounds for entry in bench.contenders):
        show(options, bench, sink)
    if bench.interrupted:
        return INTERRUPTED
    if failed:
        raise _failure(failed)
    return 0


def show(options: BenchOptions, bench: Bench, sink: Sink | None) -> None:
    """The result on stdout and in the file that was asked for, and where the rest of it is."""
    as_json = json.dumps(bench.model_dump(mode="json", by_alias=True), indent=2, allow_nan=False) + "\n"
    if sink is not None:
        sink.write(as_json)
    if options.as_json and not isinstance(sink, Stdout):
        write_stdout(as_json)
    elif not isinstance(sink, Stdout):
        from partita.bench.views import text as view

        view.render(bench, stdout_console())
    if isinstance(sink, Output):
        say_written("result", sink.path)
    for entry in bench.contenders:
        if entry.report is not None:
            say_written("report", entry.report)


def _failure(failed: Sequence[Racer]) -> PartitaError:
    """One error for all contenders that could not run: of the class of the first, with its nodes."""
    first = failed[0].error
    assert first is not None
    text = "; ".join(f"{racer.entry.name}: {racer.error}" for racer in failed)
    return ProviderError(text, nodes=first.nodes) if isinstance(first, ProviderError) else type(first)(text)
