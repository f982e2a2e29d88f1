"""`partita bench`: one prompt on several providers, interleaved; medians, ratios, and where the time goes.

Figures are printed first; then a contender that could not run, or Ctrl-C, ends the command.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from partita.commands.arguments import (
    package_of,
    parse_ids,
    print_written,
    read_prompts,
    reserve_output,
    show_and_write,
)
from partita.commands.terminal import Spinner, note
from partita.errors import INTERRUPTED, UsageError
from partita.library.bench import Race
from partita.options.fields import input_paths
from partita.options.inspection import BenchCommand
from partita.partition_reports.render.show import load_view


def run(options: BenchCommand) -> int:
    """Measure, print, and return the exit code.

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
    with Spinner() as spinner:
        found = race.measure(spinner.update)
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
