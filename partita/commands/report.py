"""`partita report`: reads a report file and shows it, or a record made from it, in a view."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.commands.arguments import open_sink, prepare, requested_view
from partita.commands.terminal import note
from partita.errors import ReportCheckError, ReportError, UsageError
from partita.observations.text_format import plural
from partita.options.fields import group, path_of, with_flags
from partita.options.placement import SupportCommand
from partita.options.reports import (
    REPORT_VIEWS,
    CheckCommand,
    CheckOptions,
    DiffCommand,
    ExplainCommand,
    HtmlCommand,
    MarkdownCommand,
    ShowCommand,
)
from partita.partition_reports import storage
from partita.partition_reports.render.show import load_view

if TYPE_CHECKING:
    from partita.check.gate import GateResult
    from partita.drift.records import Drift
    from partita.observations.records import Record

VIEWS = {"Report": REPORT_VIEWS, "Bench": "partita.bench.sections", "SupportTable": SupportCommand.VIEWS}
"""Module with the views of a record, by its class."""
DIFFERENT = 1
"""Exit code of `report diff --exit-code`, as of `git diff --exit-code`."""


def show(options: ShowCommand) -> None:
    """Show a report, the result of a benchmark, or a support table."""
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
    """Show a record on stdout or in a file.

    `next_to`: without --out, write a file next to it with the view's suffix; a report from stdin goes to stdout.
    Raises UsageError when there is no such view, or it would replace what it shows.
    """
    from partita.bench.records import SCHEMA as BENCH
    from partita.bench.records import Bench

    kinds: dict[str, type[Record]] = {**_compared_kinds(), BENCH: Bench}
    record = storage.read_one_of(file, kinds)
    found = load_view(view, VIEWS[type(record).__name__])
    out = out or (file.with_suffix(found.suffix) if next_to and file != storage.STDIN else None)
    open_sink(found, out, (file,)).show(record, file)


def _compared_kinds() -> dict[str, type[Record]]:
    """The records that `report diff` compares, by schema."""
    from partita.partition_reports.records import SCHEMA, Report
    from partita.support.records import SCHEMA as TABLE
    from partita.support.records import SupportTable

    return {SCHEMA: Report, TABLE: SupportTable}


def explain(options: ExplainCommand) -> None:
    """Show everything about one node. Raises UsageError, after listing matches, unless `node` matches exactly one."""
    from partita.explain import Matches, find, render_no_single

    file, as_json = Path(options.file), requested_view(options) == "json"
    showing = prepare(options)
    found = find(storage.read(file), options.node)
    if isinstance(found, Matches):
        if found.matches or as_json:
            showing.show(found)
        raise UsageError(f"{file}: {render_no_single(found)}")
    showing.show(found if options.all or as_json else found.without_lost())


def diff(options: DiffCommand) -> int:
    """Show the differences of `after`, a report or a support table, and return the exit code."""
    from partita.compare.packages import compare_tables
    from partita.compare.reports import compare

    before, after = Path(options.before), Path(options.after)
    _refuse_stdin_twice(before, after)
    showing, kinds = prepare(options), _compared_kinds()
    first: Any = storage.read_one_of(before, kinds)
    second: Any = storage.read_one_of(after, kinds)
    if type(first) is not type(second):
        raise ReportError(f"cannot compare {before} with {after}: one is a report, the other a support table")
    compared = compare if type(first).__name__ == "Report" else compare_tables
    found = compared(first, second, names=(str(before), str(after)))
    if found.unrelated_reason and not options.force:
        raise ReportError(
            f"cannot compare {before} with {after}: {found.unrelated_reason}; add --force to compare them anyway"
        )
    showing.show(found)
    return DIFFERENT if options.exit_code and not found.same else 0


def _refuse_stdin_twice(*files: Path | None) -> None:
    if files.count(storage.STDIN) > 1:
        raise UsageError("both reports are read from stdin; give a file for one of them")


def check(options: CheckCommand) -> None:
    """Check reports against their requirements. Raises ReportCheckError after showing failures."""
    files, failed = [options.file, *options.other_reports], 0
    if len(files) == 1:
        _check(options)
        return
    if options.as_json or options.view or options.out:
        raise UsageError("`as_json`, `view` and `out` are for one report; omit them, or check one report")
    _refuse_stdin_twice(*map(Path, files), path_of(options.baseline))
    for file in files:
        try:
            _check(replace(options, file=file))
        except ReportCheckError as error:
            note(f"partita: {error}")
            failed += 1
    if failed:
        raise ReportCheckError(f"{failed} of {plural(len(files), 'report')} failed")


def _check(options: CheckCommand) -> None:
    """Check a report, or a drift, against its requirements. Raises ReportCheckError after showing failures."""
    from partita.check import gate
    from partita.drift.records import SCHEMA as DRIFT
    from partita.drift.records import Drift
    from partita.library.report import check_report
    from partita.partition_reports.records import SCHEMA, Report

    file, baseline = Path(options.file), path_of(options.baseline)
    _refuse_stdin_twice(file, baseline)
    showing = prepare(options)
    kinds: dict[str, type[Record]] = {SCHEMA: Report, DRIFT: Drift}
    record: Any = storage.read_one_of(file, kinds)
    if isinstance(record, Drift):
        result = _check_drift(options, record)
    elif options.max_drift is not None:
        raise UsageError(f"`max_drift` is for results of `partita drift --json`; {file} is a report")
    else:
        compared = None if baseline is None else (str(baseline), storage.read(baseline))
        result = check_report(record, options, str(file), compared)
    showing.show(result)
    if not result.passed:
        raise ReportCheckError(gate.headline(result))


def _check_drift(options: CheckCommand, found: Drift) -> GateResult:
    """Check the largest error of a drift. Raises UsageError without a limit, or with limits of reports."""
    from partita.check import gate
    from partita.drift.document import error_text

    most, file = options.max_drift, str(options.file)
    others = replace(group(options, CheckOptions), require=tuple(options.require))
    if most is None or options.baseline is not None or others != CheckOptions():
        raise UsageError(f"{file} is a result of drift: give `max_drift`, and no limit of reports")
    worst, reason = found.worst, found.unused_because
    figure = gate.Figure(
        None if reason is not None else worst.compared_error,
        f"error {error_text(worst.compared_error)} in {worst.name}",
        unknown_reason=f"no node ran on {found.provider.partition(',')[0]} ({reason})",
    )
    return gate.GateResult.of(file, {with_flags(f"`max_drift={most}`"): gate.decide(figure, "<=", most)})
