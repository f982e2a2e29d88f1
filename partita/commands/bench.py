"""`partita bench`: the same prompt on several providers, in turns; medians, ratios, and where the time goes.

Figures are printed first; what then ends the command is a contender that could not run, or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import partita
from partita.commands.bench_child import Task
from partita.commands.bench_options import (
    BenchOptions,
    Entry,
    check_options,
    read_baseline,
    read_entries,
    read_tokens,
    report_files,
)
from partita.commands.bench_rounds import Race, Racer, Say
from partita.commands.terminal import note, stderr, stdout_console, write_stdout
from partita.errors import INTERRUPTED, PartitaError, ProviderError
from partita.package import Manifest, check_files, read_manifest
from partita.partition_reports.bench_records import Bench
from partita.partition_reports.bench_verdict import give_verdict
from partita.partition_reports.benching import build_contenders, choose_baseline, complete_rounds

NOT_ALONE = "the packages are open at the same time, one process each; only one computes at a time"


def run(options: BenchOptions) -> int:
    """Measure, print, and return the exit code.

    Raises UsageError, PackageError, ReportError and GenerationError before anything runs; afterwards the error of a
    contender that failed, and KeyboardInterrupt when not one round was complete.
    """
    check_options(options)
    entries = read_entries(options)
    baseline = read_baseline(options.baseline, entries, options.provider_libraries)
    manifest = read_manifest(options.package)
    check_files(options.package, manifest, hashes=False)
    prompts = read_tokens(options, manifest)
    files = report_files(options, entries)
    for line in dict.fromkeys(line for entry in entries for line in entry.notes):
        note(f"note: {line}")
    task = Task(str(options.package.resolve()), prompts, options.max_new_tokens, options.prefill_chunk)
    racers, interrupted = race(options, entries, task, files)
    bench = build(options, manifest, racers, files, baseline, len(prompts[0]), interrupted=interrupted)
    return finish(options, bench, racers)


def race(
    options: BenchOptions, entries: Sequence[Entry], task: Task, files: dict[str, Path]
) -> tuple[list[Racer], bool]:
    """The rounds; and whether Ctrl-C ended them. Raises KeyboardInterrupt when it did before one was complete."""
    from partita.runtime.child_process import ended_cleanly

    with tempfile.TemporaryDirectory(prefix="partita-") as folder, ended_cleanly(), saying() as say:
        contest = Race(entries, task, Path(folder), options.timeout_seconds, say)
        try:
            with contest:
                contest.load()
                contest.run(options.rounds)
                contest.observe(files)
        except KeyboardInterrupt:
            if not complete_rounds([racer.lane(None) for racer in contest.racers]):
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
    options: BenchOptions, manifest: Manifest, racers: Sequence[Racer], files: dict[str, Path], asked: str | None,
    prompt_tokens: int, *, interrupted: bool,
) -> Bench:  # fmt: skip
    """The record of a bench."""
    from partita.commands.run_report import package_facts

    lanes = [racer.lane(files.get(racer.entry.name)) for racer in racers]
    baseline = choose_baseline(lanes, asked)
    contenders = build_contenders(lanes, baseline)
    notes = [NOT_ALONE] if len(lanes) > 1 else []
    if asked is not None and asked != baseline:
        notes.append(f"--baseline {asked} was not measured" + (f"; {baseline} takes its place" if baseline else ""))
    if interrupted:
        notes.append(f"interrupted: {len(complete_rounds(lanes))} of {options.rounds} rounds are complete")
    if manifest.verification.status == "unverified":
        notes.append(f"this package is unverified: {manifest.verification.detail}")
    return Bench(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        partita_version=partita.__version__,
        verdict=give_verdict(contenders, baseline),
        environment=next((found for racer in racers if (found := racer.environment()) is not None), None),
        package=package_facts(options.package, manifest),
        prompt_tokens=prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        threads=options.threads,
        rounds=options.rounds,
        interrupted=interrupted,
        baseline=baseline,
        contenders=contenders,
        notes=tuple(notes),
    )


def finish(options: BenchOptions, bench: Bench, racers: Sequence[Racer]) -> int:
    """Print, then raise what went wrong, else return the exit code."""
    failed = [racer for racer in racers if racer.error is not None]
    if any(entry.rounds for entry in bench.contenders):
        if options.as_json:
            write_stdout(json.dumps(bench.model_dump(mode="json", by_alias=True), indent=2, allow_nan=False) + "\n")
        else:
            from partita.partition_reports.views import _bench

            _bench.render(bench, stdout_console())
        for entry in bench.contenders:
            if entry.report is not None:
                note(f"report: {entry.report} (see it with: partita report show {entry.report})")
    if bench.interrupted:
        return INTERRUPTED
    if failed:
        raise failure(failed)
    return 0


def failure(failed: Sequence[Racer]) -> PartitaError:
    """One error for all contenders that could not run: of the class of the first, with its table."""
    first = failed[0].error
    assert first is not None
    text = "; ".join(f"{racer.entry.name}: {racer.error}" for racer in failed)
    return ProviderError(text, details=first.details) if isinstance(first, ProviderError) else type(first)(text)
