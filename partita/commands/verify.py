"""`partita verify`, `evaluate` and `bench`: the known answer, the perplexity and the speed of a package on providers.

Figures of a benchmark are printed first; then a contender that could not run, or Ctrl-C, ends the command.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from partita.commands.arguments import (
    package_of,
    parse_ids,
    print_written,
    read_prompts,
    reserve_output,
    show_and_write,
)
from partita.commands.results import EvaluateResult, VerifyResult
from partita.commands.terminal import TERMINAL, Bars, note, print_record, print_target_notes, stdout_console
from partita.errors import INTERRUPTED, ParityError, UsageError
from partita.export.progress import stage
from partita.foreign.evidence import read_evidence
from partita.foreign.folder import Choice, open_folder
from partita.library.bench import Race
from partita.library.chain import Target, read_chain
from partita.library.engine.jobs import run_job
from partita.library.loading import in_child
from partita.observations.text_format import NOT_KNOWN, nats, plural
from partita.options.fields import input_paths
from partita.options.inspection import BenchCommand, EvaluateCommand, VerifyCommand
from partita.package.folder import Manifest, check_files
from partita.package.records import Evaluation, Verification
from partita.partition_reports.render.show import load_view
from partita.partition_reports.render.terminal import ALARM, GOOD, Page
from partita.partition_reports.sections.model import Column
from partita.remedies import Remedy

LOCATE = Remedy(
    "find the layer and node", ("partita", "drift", "{folder}", "--provider", "{chain}", "--against", "{reference}")
)
FIGURES = (
    ("perplexity", "perplexity", ".3f"),
    ("perplexity, source model", "original_perplexity", ".3f"),
    ("ratio", "perplexity_ratio", ".4f"),
    ("same best token", "top1_agreement", ".1%"),
)
"""Figures of an evaluation: name, field, and format."""
DIVERGENCES = (("KL divergence, mean", "kl_mean", 4), ("KL divergence, 99th percentile", "kl_p99", 3))
"""The same, with the number of digits."""
TOKENS_PAST_WINDOW = 64
"""Maximum tokens of a compared text beyond a window."""


def run(options: VerifyCommand) -> int:
    """Check the package's hashes, replay, print the result; ParityError on a mismatch.

    A folder that Partita did not write is compared with its original model, `reference`. Raises PackageError without.
    The remedy of a mismatch compares the chain with the CPU provider, and the CPU provider with the source model.
    """
    package, choice, reference = Path(options.package), Choice.of(options), options.reference
    target = read_chain(options)
    manifest = open_folder(package, choice)
    if reference is not None and manifest.foreign is not None and choice.max_length is None:
        window, longest = read_evidence(package).window, manifest.graph.max_length_limit or 0
        if window == manifest.graph.max_length < longest:  # the graph lacks it: compare texts that show that
            manifest = open_folder(package, replace(choice, max_length=min(longest, window + TOKENS_PAST_WINDOW)))
    result: Verification = _job("verify_with", package, manifest, target, reference)
    if options.as_json:
        print_record(VerifyResult(package=str(package), **_without_nan(result)))
    else:
        show(package, result, stdout_console())
    if result.status != "verified" and result.tolerance is not None:  # else it was not judged
        other = reference or "original" if target.name == "cpu" else "cpu"
        limits = "" if manifest.foreign is None else "".join(f"; {note}" for note in manifest.foreign.notes)
        raise ParityError(
            f"{package}: outputs differ from the source model's on {result.provider}: {result.detail}{limits}",
            remedy=LOCATE.filled(folder=package, chain=target.name, reference=other),
        )
    return 0


def _job(function: str, package: Path, manifest: Manifest, target: Target, *others: Any) -> Any:
    """Check the package's hashes, and call a function of `library.verifying`, in a worker process if necessary."""
    check_files(package, manifest, hashes=True)
    work, in_worker = f"partita.library.verifying:{function}", in_child(target, "auto")
    arguments = (work, package, manifest, target, *others)
    print_target_notes(target)
    return run_job(*arguments, chain=target.chain, in_worker=in_worker, audience=TERMINAL)


def _without_nan(result: BaseModel) -> dict[str, Any]:
    """The fields as JSON has them, with null for NaN and infinity."""
    found: dict[str, Any] = json.loads(result.model_dump_json())
    return found


def show(package: Path, result: Verification, console: Console) -> None:
    """Print the outcome, the reference, and one line per step."""
    page = Page(console)
    # Not wrapped: a log is searched by line.
    if result.status == "verified":
        page.put(f"{package}: {result.headline} on {result.provider}", GOOD)
    elif result.tolerance is None:
        page.put(f"{package}: {result.detail}")
    else:
        page.put(f"{package}: FAILED: outputs differ from the source model's on {result.provider}", ALARM)
    ties = f", {plural(result.near_ties, 'near tie')} excluded from the token comparison" if result.near_ties else ""
    if result.rerouted:
        ties += f", {plural(result.rerouted, 'position')} excluded because rounding selects other experts there"
    tolerance_text = "none" if result.tolerance is None else f"{result.tolerance:g} (largest relative error)"
    page.pairs([("reference", result.reference or NOT_KNOWN), ("tolerance", f"{tolerance_text}{ties}")])
    titles = ("step", "output", "max abs err", "max rel err", "greedy tokens")
    columns = [Column(title, number=title.startswith("max")) for title in titles]
    rows = []
    for step in result.steps:
        errors = f"{step.max_abs_error:.3e}", f"{step.max_rel_error:.3e}"
        rows.append((step.step, step.output, *errors, "equal" if step.tokens_equal else "DIFFERENT"))
    page.table(columns, rows)


def evaluate(options: EvaluateCommand) -> int:
    """Check the package's hashes, read its text, print the perplexity next to the source model's."""
    package, target = Path(options.package), read_chain(options)
    manifest = open_folder(package)
    with Bars() as bars, stage(bars, "evaluate", {}):
        result: Evaluation = _job("evaluate", package, manifest, target)
    if options.as_json:
        precision, at_export = manifest.graph.precision, manifest.quality
        figures = _without_nan(result)
        print_record(EvaluateResult(package=str(package), precision=precision, at_export=at_export, **figures))
    else:
        show_evaluation(package, manifest, result, stdout_console())
    return 0


def show_evaluation(package: Path, manifest: Manifest, result: Evaluation, console: Console) -> None:
    """The result as text: figures measured now, next to those of the export."""
    page, stored = Page(console), manifest.quality
    page.put(f"{package}: {manifest.graph.precision} on {result.provider}")
    rows = []
    for name, field, form in FIGURES:
        then = "" if stored is None else format(getattr(stored, field), form)
        rows.append((name, format(getattr(result, field), form), then))
    for name, field, digits in DIVERGENCES:
        least = getattr(result, f"{field}_at_least")
        here = "" if least is None else f">= {nats(least, digits)}"
        rows.append((name, here, "" if stored is None else nats(getattr(stored, field), digits)))
    if stored is not None:
        tokens = f"{result.tokens:,} predicted tokens, windows of {stored.window_tokens} tokens"
        page.pairs([("text", f"{stored.text}, {tokens}")])
    page.table((Column("figure", number=False), Column("here"), Column("at export")), rows)
    if result.kl_tokens is None or result.kl_share is None:
        bound = "not measured: the package lacks the source model's probabilities; export it again"
    else:
        bound = (
            f"here: lower bound from the {plural(result.kl_tokens, 'likeliest token')} of the source model "
            f"({result.kl_share:.1%} of its probability; all other tokens counted as one)"
        )
        if stored is not None and (likely := stored.likely) is not None:
            bound += f"; at export: {nats(likely.kl_mean)}, 99th percentile {nats(likely.kl_p99, 3)}"
    page.pairs([("divergence", bound)])


def bench(options: BenchCommand) -> int:
    """Measure one prompt on several providers, print, and return the exit code.

    Raises UsageError, PackageError, ReportError and GenerationError before anything runs; afterwards the error of a
    contender that failed, and KeyboardInterrupt when no turn was counted yet.
    """
    if options.token_ids and options.prompt is None:
        raise UsageError("--token-ids needs --prompt, e.g. --prompt 1,45,7")
    prompt: str | tuple[int, ...] | None = None
    if options.prompt is not None:
        (text,) = read_prompts([str(options.prompt)])
        prompt = tuple(parse_ids(text)) if options.token_ids else text
    chains = (*(options.chains or ()), *options.more)
    options = replace(options, chains=chains or None, prompt=prompt)
    package, *against = (package_of(model, options) for model in (options.package, *options.against))
    race = Race(replace(options, package=package, against=against))
    reports = [racer.report for racer in race.racers if racer.report is not None]
    sink = None
    if options.out is not None:
        sink = reserve_output(Path(options.out), "result", (*input_paths(race.options), *reports), option="--out")
    for line in race.notes:
        note(f"note: {line}")
    with Bars() as bars:
        task = bars.bars.add_task("", total=None, size="")
        found = race.measure(lambda title: bars.bars.update(task, description=title))
    if any(each.rounds for each in found.contenders):
        view = load_view("json" if options.as_json else "text", "partita.bench.sections")
        show_and_write(found, view, sink, "result")
        for entry in found.contenders:
            if entry.report is not None:
                print_written("report", entry.report)
    if found.interrupted:
        return INTERRUPTED
    if (error := race.error()) is not None:
        raise error
    return 0
