"""`partita report`: read a report file and hand it to a view."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partita.commands.outputs import STDOUT, claim_output
from partita.commands.terminal import note, stdout_console, write_stdout
from partita.errors import ReportCheckError, ReportError, UsageError
from partita.files import STDIN, Output
from partita.partition_reports.views import json as json_view

if TYPE_CHECKING:
    from partita.observations.records import Record
    from partita.partition_reports.check.gate import Gate
    from partita.partition_reports.check.requirements import Vocabulary
    from partita.partition_reports.records import Report

DIFFERENT = 1
"""Exit code of `report diff --exit-code`, as `git diff --exit-code` has it."""


def show(file: Path, *, as_json: bool, brief: bool = False) -> None:
    """Show a report or the result of a bench: as text, in ten lines or in full, or as the JSON it is stored in."""
    from partita.bench.views import text as bench_view
    from partita.partition_reports.records import Report
    from partita.partition_reports.views import brief as ten_lines
    from partita.partition_reports.views import text

    report = json_view.read_shown(file)
    if as_json:
        write_stdout(json_view.to_text(report))
    elif not isinstance(report, Report):
        bench_view.render(report, stdout_console(), brief=brief)
    else:
        (ten_lines if brief else text).render(report, stdout_console())


def write_record(record: Record) -> None:
    """A record as JSON on stdout, in plain ASCII: names can hold what a terminal would act on."""
    write_stdout(json.dumps(record.model_dump(mode="json", by_alias=True), indent=2, allow_nan=False) + "\n")


def explain(file: Path, node: str, *, as_json: bool) -> None:
    """Show everything about one node. Raises UsageError when `node` fits none or several, which are listed first."""
    from partita.partition_reports import explaining
    from partita.partition_reports.views import explain as view

    found = explaining.find(json_view.read(file), node)
    if as_json:
        write_record(found)
    if isinstance(found, explaining.Matches):
        if found.matches and not as_json:
            view.render_matches(found, stdout_console())
        raise UsageError(f"{file}: {view.say_no_single(found)}")
    if not as_json:
        view.render(found, stdout_console())


def diff(before: Path, after: Path, *, as_json: bool, force: bool, exit_code: bool) -> int:
    """Show what is different in `after`, and return the exit code."""
    if before == after == json_view.STDIN:
        raise UsageError("both reports cannot come from stdin; name a file for one of them")
    from partita.partition_reports.diff.compare import compare
    from partita.partition_reports.diff.views import text as view

    found = compare(json_view.read(before), json_view.read(after), names=(str(before), str(after)))
    if found.unrelated and not force:
        raise ReportError(
            f"cannot compare {before} with {after}: {found.unrelated}; --force compares them all the same"
        )
    if as_json:
        write_record(found)
    else:
        view.render(found, stdout_console())
    return DIFFERENT if exit_code and not found.same else 0


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What the user wants to hold of a report. None: not asked."""

    max_cpu_nodes: int | None
    max_copies: int | None
    max_copy_bytes_per_token: int | None
    max_unexplained: int | None
    cache_in_place: bool
    min_tokens_per_second: float | None
    require: tuple[str, ...]
    baseline: Path | None
    max_slowdown: float | None


def check(file: Path, options: CheckOptions, *, as_json: bool) -> None:
    """Hold a report against the options. Raises ReportCheckError after showing what does not hold."""
    from partita.partition_reports.check import gate
    from partita.partition_reports.check.views import text as view

    report = json_view.read(file)
    asked = gate_of(options, vocabulary(report))
    baseline = (str(options.baseline), json_view.read(options.baseline)) if options.baseline is not None else None
    result = gate.check(report, asked, str(file), baseline)
    if as_json:
        write_record(result)
    else:
        view.render(result, stdout_console())
    if not result.passed:
        raise ReportCheckError(view.summary(result))


def gate_of(options: CheckOptions, words: Vocabulary) -> Gate:
    """The options as a gate. Raises UsageError for one that makes no sense, and when nothing is asked."""
    from partita.partition_reports.check.gate import Gate
    from partita.partition_reports.check.limits import Limits, check_limits
    from partita.partition_reports.check.requirements import parse_requirement

    limits = Limits(options.max_cpu_nodes, options.max_copies, options.max_copy_bytes_per_token)
    check_limits(limits, ())
    for name in ("max_unexplained", "min_tokens_per_second", "max_slowdown"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be a number that is 0 or more")
    if options.max_slowdown is not None and options.baseline is None:
        raise UsageError("--max-slowdown needs --baseline: slower than what?")
    asked = Gate(
        limits=limits,
        max_unexplained=options.max_unexplained,
        cache_in_place=options.cache_in_place,
        min_tokens_per_second=options.min_tokens_per_second,
        requirements=tuple(parse_requirement(text, words) for text in options.require),
        max_slowdown=options.max_slowdown,
    )
    if asked == Gate() and options.baseline is None:
        raise UsageError("nothing to check: give --baseline, --require or a limit; --help lists them")
    return asked


def vocabulary(report: Report) -> Vocabulary:
    """Names of providers and reasons that a requirement may use; a plugin's provider is known by its report only."""
    from partita.diagnosis.reasons.base import load_reasons
    from partita.partition_reports.check.requirements import Vocabulary
    from partita.providers.resolve import parse_chain

    seen = [entry.provider for entry in report.chain]
    seen += [entry.provider for phase in report.phases for entry in phase.providers]

    def provider(name: str) -> str:
        found = next((entry for entry in seen if name.casefold() == entry.casefold()), None)
        if found is not None:
            return found
        return parse_chain(name, flag="--require")[0].ort_name

    return Vocabulary(provider, tuple(reason.code for reason in load_reasons()))


def markdown(file: Path, out: Path | None) -> None:
    """Write a report as Markdown, to stdout or to a file."""
    from partita.partition_reports.views import markdown as view

    sink = claim_output(out or STDOUT, "comment", (file, STDIN), option="--out")
    sink.write(view.to_text(json_view.read(file)))
    if isinstance(sink, Output):
        note(f"markdown: {sink.path}")


def trace(file: Path, out: Path | None) -> None:
    """Write the observation window as a trace, to stdout or to a file."""
    from partita.partition_reports.views import trace as view

    sink = claim_output(out or STDOUT, "trace", (file, STDIN), option="--out")
    report = json_view.read(file)
    try:
        text = view.to_text(report)
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from error
    sink.write(text)
    if isinstance(sink, Output):
        note(f"trace: {sink.path} (open it in ui.perfetto.dev or chrome://tracing)")


def write_html(file: Path, out: Path | None) -> None:
    """Write a report or the result of a bench as one HTML page to `out`, by default beside it; `-` is stdout.

    Raises UsageError when the page would replace the report.
    """
    from partita.bench.views import html as bench_html
    from partita.partition_reports.records import Report
    from partita.partition_reports.views import html

    page = out or (STDOUT if file == json_view.STDIN else file.with_suffix(".html"))
    sink = claim_output(page, "page", (file, STDIN), option="--out")
    report = json_view.read_shown(file)
    sink.write(html.to_text(report) if isinstance(report, Report) else bench_html.to_text(report))
    if isinstance(sink, Output):
        note(f"page: {sink.path}")
