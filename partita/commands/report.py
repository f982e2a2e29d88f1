"""`partita report`: read a report file and hand it to a view."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from partita.commands.outputs import STDOUT, Stdout, claim_output
from partita.commands.terminal import note, stdout_console, write_stdout
from partita.errors import ReportCheckError, ReportError, UsageError
from partita.files import STDIN, Output
from partita.observations.text_format import listing
from partita.partition_reports import storage
from partita.partition_reports.render.view import REPORT_VIEWS

if TYPE_CHECKING:
    from partita.library.checking import Wanted
    from partita.observations.records import Record
    from partita.partition_reports.render.view import View

BENCH_VIEWS = "partita.bench.views"
DIFFERENT = 1
"""Exit code of `report diff --exit-code`, as `git diff --exit-code` has it."""


def show(file: Path, view: str, out: Path | None, *, beside: bool = False) -> None:
    """Show a report or the result of a bench in the view of that name: on stdout, or in the file `out`.

    `beside`: without `out`, in a file beside it, with the view's suffix; what comes from stdin goes to stdout then.
    Raises UsageError when there is no such view, or it would replace what it shows, ReportError when it shows another
    kind of record.
    """
    record = storage.read_one_of(file, _kinds())
    found = _find_view(file, record, view)
    place = out or (file.with_suffix(found.suffix) if beside and file != storage.STDIN else STDOUT)
    sink = claim_output(place, found.what or found.name, (file, STDIN), option="--out")
    if found.print_to is not None and isinstance(sink, Stdout):
        found.print_to(record, stdout_console())
        return
    try:
        text = found.to_text(record)
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from error
    sink.write(text)
    if isinstance(sink, Output):
        note(f"{found.what or found.name}: {sink.path}{f' ({found.hint})' if found.hint else ''}")


def one_view(view: str | None, *, brief: bool, as_json: bool) -> str:
    """The view that is asked for by name or by a short form of it. Raises UsageError when two are."""
    asked = {"--view": view, "--brief": "brief" if brief else None, "--json": "json" if as_json else None}
    given = [(option, name) for option, name in asked.items() if name is not None]
    if len({name for _, name in given}) > 1:
        raise UsageError(f"{listing(option for option, _ in given)} ask for different views; keep one")
    return given[0][1] if given else "text"


def _kinds() -> dict[str, type[Record]]:
    """What is shown, by the schema in the file."""
    from partita.bench.records import SCHEMA as BENCH
    from partita.bench.records import Bench
    from partita.partition_reports.records import SCHEMA, Report

    return {SCHEMA: Report, BENCH: Bench}


def _find_view(file: Path, record: Record, name: str) -> View:
    """The view of that name, of the kind of the record. Raises UsageError, and ReportError for one of another kind."""
    from partita.partition_reports.records import Report
    from partita.partition_reports.render.view import load_view, view_names

    folder = REPORT_VIEWS if isinstance(record, Report) else BENCH_VIEWS
    if name not in view_names(folder) and name in view_names():
        raise ReportError(
            f"{file}: the result of a bench has no view {name!r}; it has {', '.join(view_names(folder))}, and "
            "bench --report DIR writes partition reports"
        )
    return load_view(name, folder)


def _write_record(record: Record) -> None:
    """A record as JSON on stdout, in plain ASCII: names can hold what a terminal would act on."""
    write_stdout(json.dumps(record.model_dump(mode="json", by_alias=True), indent=2, allow_nan=False) + "\n")


def explain(file: Path, node: str, *, as_json: bool) -> None:
    """Show everything about one node. Raises UsageError when `node` fits none or several, which are listed first."""
    from partita.explain import node_explanation
    from partita.explain.views import text as view

    found = node_explanation.find(storage.read(file), node)
    if as_json:
        _write_record(found)
    if isinstance(found, node_explanation.Matches):
        if found.matches and not as_json:
            view.render_matches(found, stdout_console())
        raise UsageError(f"{file}: {view.say_no_single(found)}")
    if not as_json:
        view.render(found, stdout_console())


def diff(before: Path, after: Path, *, as_json: bool, force: bool, exit_code: bool) -> int:
    """Show what is different in `after`, and return the exit code."""
    if before == after == storage.STDIN:
        raise UsageError("both reports cannot come from stdin; name a file for one of them")
    from partita.diff.compare import compare
    from partita.diff.views import text as view

    found = compare(storage.read(before), storage.read(after), names=(str(before), str(after)))
    if found.unrelated and not force:
        raise ReportError(
            f"cannot compare {before} with {after}: {found.unrelated}; --force compares them all the same"
        )
    if as_json:
        _write_record(found)
    else:
        view.render(found, stdout_console())
    return DIFFERENT if exit_code and not found.same else 0


def check(file: Path, wanted: Wanted, baseline: Path | None, *, as_json: bool) -> None:
    """Hold a report against what is wanted of it. Raises ReportCheckError after showing what does not hold."""
    from partita.check import gate
    from partita.check.views import text as view
    from partita.library.checking import gate_of, vocabulary

    report = storage.read(file)
    asked = gate_of(wanted, vocabulary(report), baseline=baseline is not None)
    if asked == gate.Gate() and baseline is None:
        raise UsageError("nothing to check: give --baseline, --require or a limit; --help lists them")
    beside = None if baseline is None else (str(baseline), storage.read(baseline))
    result = gate.check(report, asked, str(file), beside)
    if as_json:
        _write_record(result)
    else:
        view.render(result, stdout_console())
    if not result.passed:
        raise ReportCheckError(view.summary(result))
