"""`partita report`: reads a report file and shows it, or a record made from it, in a view."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from partita.commands.outputs import open_sink, prepare, requested_view
from partita.commands.terminal import note
from partita.errors import ReportCheckError, ReportError, UsageError
from partita.observations.text_format import plural
from partita.options.fields import path_of
from partita.options.reports import (
    REPORT_VIEWS,
    CheckCommand,
    DiffCommand,
    ExplainCommand,
    HtmlCommand,
    MarkdownCommand,
    ShowCommand,
)
from partita.partition_reports import storage

if TYPE_CHECKING:
    from partita.observations.records import Record

BENCH_VIEWS = "partita.bench.sections"
DIFFERENT = 1
"""Exit code of `report diff --exit-code`, as of `git diff --exit-code`."""


def show(options: ShowCommand) -> None:
    """Show a report or the result of a benchmark."""
    _show(
        Path(options.file), requested_view(options, "brief", full=options.full, out=options.out), path_of(options.out)
    )


def html(options: HtmlCommand) -> None:
    """Write a report as a page."""
    _show(Path(options.file), "html", path_of(options.out), next_to=True)


def markdown(options: MarkdownCommand) -> None:
    """Write a report as Markdown."""
    _show(Path(options.file), "markdown", path_of(options.out))


def _show(file: Path, view: str, out: Path | None, *, next_to: bool = False) -> None:
    """Show a report or a bench result on stdout or in a file.

    `next_to`: without --out, write a file next to it with the view's suffix; a report from stdin goes to stdout.
    Raises UsageError when there is no such view, or it would replace what it shows.
    """
    from partita.bench.records import SCHEMA as BENCH
    from partita.bench.records import Bench
    from partita.partition_reports.records import SCHEMA, Report
    from partita.partition_reports.render.show import load_view

    kinds: dict[str, type[Record]] = {SCHEMA: Report, BENCH: Bench}
    record = storage.read_one_of(file, kinds)
    found = load_view(view, REPORT_VIEWS if isinstance(record, Report) else BENCH_VIEWS)
    out = out or (file.with_suffix(found.suffix) if next_to and file != storage.STDIN else None)
    open_sink(found, out, (file,)).show(record, file)


def explain(options: ExplainCommand) -> None:
    """Show everything about one node. Raises UsageError, after listing matches, unless `node` matches exactly one."""
    from partita.explain import node_explanation
    from partita.explain.document import render_no_single

    file, as_json = Path(options.file), requested_view(options) == "json"
    showing = prepare(options)
    found = node_explanation.find(storage.read(file), options.node)
    if isinstance(found, node_explanation.Matches):
        if found.matches or as_json:
            showing.show(found)
        raise UsageError(f"{file}: {render_no_single(found)}")
    showing.show(found if options.all or as_json else found.without_lost())


def diff(options: DiffCommand) -> int:
    """Show the differences of `after`, and return the exit code."""
    before, after = Path(options.before), Path(options.after)
    if before == after == storage.STDIN:
        raise UsageError("both reports are read from stdin; give a file for one of them")
    from partita.compare.reports import compare

    showing = prepare(options)
    found = compare(storage.read(before), storage.read(after), names=(str(before), str(after)))
    if found.unrelated_reason and not options.force:
        raise ReportError(
            f"cannot compare {before} with {after}: {found.unrelated_reason}; add --force to compare them anyway"
        )
    showing.show(found)
    return DIFFERENT if options.exit_code and not found.same else 0


def check(options: CheckCommand) -> None:
    """Check reports against their requirements. Raises ReportCheckError after showing failures."""
    files, failed = [options.file, *options.other_reports], 0
    if not options.other_reports:
        _check(options)
        return
    if options.as_json or options.view or options.out:
        raise UsageError("`as_json`, `view` and `out` are for one report; omit them, or check one report")
    for file in files:
        try:
            _check(replace(options, file=file))
        except ReportCheckError as error:
            note(f"partita: {error}")
            failed += 1
    if failed:
        raise ReportCheckError(f"{failed} of {plural(len(files), 'report')} failed")


def _check(options: CheckCommand) -> None:
    """Check one report against its requirements. Raises ReportCheckError after showing failures."""
    from partita.check import gate
    from partita.library.report import check_report

    file, baseline = Path(options.file), path_of(options.baseline)
    if file == baseline == storage.STDIN:
        raise UsageError("both reports are read from stdin; give a file for one of them")
    showing = prepare(options)
    report = storage.read(file)
    compared = None if baseline is None else (str(baseline), storage.read(baseline))
    result = check_report(report, options, str(file), compared)
    showing.show(result)
    if not result.passed:
        raise ReportCheckError(gate.headline(result))
