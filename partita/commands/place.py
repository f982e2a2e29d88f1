"""`partita place`: placement of the nodes of any ONNX model, copies and reasons; also on CUDA without a GPU.

The report is printed and written first; what then ends the command is a run that failed, a limit that is not met, or
Ctrl-C.
"""

from __future__ import annotations

from pathlib import Path

from partita.commands.audience import TERMINAL, print_target_notes
from partita.commands.outputs import Sink, data_files, refuse_two_on_stdout, reserve_output, show_and_write
from partita.commands.terminal import note
from partita.errors import INTERRUPTED, PartitaError, UsageError
from partita.foreign.folder import Choice
from partita.library.chain import read_by
from partita.library.notes import not_used
from partita.library.place.placement import place_model, read_place
from partita.library.run_report import limits_error
from partita.options.placement import PlaceCommand
from partita.partition_reports import storage
from partita.partition_reports.records import Report
from partita.partition_reports.render.show import REPORT_VIEWS, load_view


def run(options: PlaceCommand) -> int:
    """Place the model, print and write the report; returns the exit code.

    Raises UsageError, PackageError, ReportError, ResourceError, and ProviderError when the chain cannot be honoured or
    a limit is exceeded.
    """
    target = read_place(options)
    sink = _reserve_report(options)
    print_target_notes(target)
    report, error = place_model(options, target, audience=TERMINAL)
    return _finish(options, sink, report, error)


def _reserve_report(options: PlaceCommand) -> Sink | None:
    """Output of the report; None without `--report`."""
    if options.full and options.as_json:
        raise UsageError("--full and --json select different views; keep one")
    if options.report is None:
        return None
    report, model = Path(options.report), Path(options.model)
    refuse_two_on_stdout(report, as_json=options.as_json)
    given = [model, *Choice.of(options).input_paths, *map(Path, (options.inputs or {}).values())]
    if report.exists() and model.is_file():  # a report that does not exist yet is no input
        given += data_files(model)
    return reserve_output(report, "report", read_by(options, *given), option="--report")


def _finish(options: PlaceCommand, sink: Sink | None, report: Report, error: PartitaError | None) -> int:
    """Write and print the report, then the error; returns the exit code.

    Raises `error`, why a run failed, or ProviderError for a limit.
    """
    for entry in report.chain:
        if entry.status != "active":
            note(f"note: {not_used(entry.provider, entry)}")
    view, text = load_view("text" if options.full else "brief", REPORT_VIEWS), storage.to_json(report)
    show_and_write(report, view, text, sink, "report", as_json=options.as_json)
    if error is not None:
        raise error
    over = limits_error(report)
    if over is not None:
        raise over
    return INTERRUPTED if report.interruptions else 0
