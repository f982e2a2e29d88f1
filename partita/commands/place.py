"""`partita place`: which node of any ONNX model runs where, what is copied, and why; also on CUDA without a GPU.

The report is printed and written first; what then ends the command is a run that failed, a limit that is not met, or
Ctrl-C.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partita.commands.audience import TERMINAL, say_target
from partita.commands.outputs import STDOUT, Sink, claim_output, data_files, refuse_two_on_stdout, say_written
from partita.commands.terminal import note, stdout_console, write_stdout
from partita.errors import INTERRUPTED, PartitaError
from partita.files import Output
from partita.library.chain import read_by, read_chain_options
from partita.library.notes import not_used
from partita.library.place_options import PlaceOptions, check_chain, check_options
from partita.library.placing import place_model
from partita.library.run_report import limits_error
from partita.partition_reports import storage
from partita.partition_reports.records import Report


@dataclass(frozen=True, slots=True)
class Shown:
    """What is to become of the report."""

    report: Path | None = None
    """A file for it; None: none."""
    as_json: bool = False


def named_files(text: str) -> list[Path]:
    """What may be the file of `NAME=FILE`, whose name and path may have a = in them: what follows each of them."""
    return [Path(text[position + 1 :]) for position, letter in enumerate(text) if letter == "="]


def run(options: PlaceOptions, shown: Shown) -> int:
    """Place the model, print and write the report; returns the exit code.

    Raises UsageError, PackageError, ReportError, ResourceError, and ProviderError when the chain cannot be honoured or
    a limit is exceeded.
    """
    check_options(options)
    target = read_chain_options(options.where)
    check_chain(options, target.asked_names)
    sink = _claim_report(options, shown)
    say_target(target)
    report, error = place_model(options, target, audience=TERMINAL)
    return _finish(shown, sink, report, error)


def _claim_report(options: PlaceOptions, shown: Shown) -> Sink | None:
    """Where the report goes; None when nobody wants it in a file."""
    if shown.report is None:
        return None
    refuse_two_on_stdout(shown.report, as_json=shown.as_json)
    given = [options.model, *options.choice.reads, *(path for text in options.values for path in named_files(text))]
    if shown.report.exists() and options.model.is_file():  # what is not there yet is not read, either
        given += data_files(options.model)
    return claim_output(shown.report, "report", read_by(options.where, *given), option="--report")


def _finish(shown: Shown, sink: Sink | None, report: Report, error: PartitaError | None) -> int:
    """Write and print the report, then say what went wrong; the exit code.

    Raises `error`, why a run failed, or ProviderError for a limit.
    """
    for entry in report.chain:
        if entry.status != "active":
            note(f"note: {not_used(entry.provider, entry)}")
    try:
        if shown.as_json:
            write_stdout(storage.to_json(report))
        elif shown.report != STDOUT:
            from partita.partition_reports.views import text

            text.render(report, stdout_console())
    finally:  # where one of the two fails, the other has the report
        if sink is not None:
            sink.write(storage.to_json(report))
    if isinstance(sink, Output):
        say_written("report", sink.path)
    if error is not None:
        raise error
    over = limits_error(report)
    if over is not None:
        raise over
    return INTERRUPTED if report.interrupted else 0
