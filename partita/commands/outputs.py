"""Outputs of verbs: files or stdout, which must not be inputs, and views of records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.commands.terminal import note, stdout_console, write_stdout, write_stdout_bytes
from partita.errors import PackageError, ReportError, UsageError
from partita.files import STDIN, Output, reserve
from partita.observations.text_format import listing
from partita.partition_reports.render.show import load_view
from partita.remedies import shell

if TYPE_CHECKING:
    from partita.partition_reports.render.view import View

STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class Stdout:
    """stdout as the output of a report or page: `-`."""

    path: Path = STDOUT

    def write(self, text: str) -> None:
        """Write `text` in UTF-8 on any terminal; a closed pipe is no error."""
        write_stdout_bytes(text.encode("utf-8"))


Sink = Output | Stdout


def reserve_output(path: Path, what: str, reads: Iterable[Path], *, option: str) -> Sink:
    """The output for `path`, reserved; `-` is stdout. Raises the errors of `partita.files`."""
    return Stdout() if path == STDOUT else reserve(path, what, reads, option=option)


def print_written(what: str, path: Path | str) -> None:
    """Print the path of a report or result, and the shell command that shows it."""
    note(f"{what}: {path} (show it with: {shell(('partita', 'report', 'show', str(path)))})")


def show_and_write(record: Any, view: View, text: str, sink: Sink | None, what: str, *, as_json: bool) -> None:
    """Show a record on stdout, as JSON `text` or in a `view` for terminals, and write `text` to `sink`.

    Nothing else goes to stdout where `sink` is stdout. Raises what writing raises.
    """
    try:
        if as_json and not isinstance(sink, Stdout):
            write_stdout(text)
        elif not isinstance(sink, Stdout):
            assert view.print_to is not None
            view.print_to(record, stdout_console())
    finally:  # where one of the two fails, the other has the record
        if sink is not None:
            sink.write(text)
    if isinstance(sink, Output):
        print_written(what, sink.path)


def refuse_two_on_stdout(report: Path | None, *, as_json: bool) -> None:
    """Raise UsageError if a report and another JSON object would both go to stdout."""
    if as_json and str(report) in (str(STDOUT), "/dev/stdout"):
        raise UsageError(f"--report {report} and --json both write to stdout; give --report a file")


def data_files(model: Path) -> tuple[Path, ...]:
    """Files with the weights of an ONNX file; empty if it cannot be read, which is reported when it is opened."""
    from partita.runtime.place.onnx_model import read_onnx

    try:
        return tuple(model.parent / name for name in read_onnx(model).data_files)
    except PackageError:
        return ()


@dataclass(frozen=True, slots=True)
class RequestedView:
    """The requested view, and its file: None is stdout."""

    view: str = "text"
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class Showing:
    """A view and its checked output."""

    view: View
    sink: Sink
    file_kind: str = ""
    """Name of its file in messages; empty: that of the view."""

    def show(self, record: Any, source: Path | None = None) -> None:
        """Print the record at the width of the terminal, or write what a file of this view holds. Raises ReportError
        where the record has not what the view shows, with the file that it comes from.
        """
        if self.view.print_to is not None and isinstance(self.sink, Stdout):
            self.view.print_to(record, stdout_console())
            return
        try:
            text = self.view.to_text(record)
        except ReportError as error:
            raise ReportError(f"{source}: {error}" if source else str(error)) from error
        self.sink.write(text)
        if isinstance(self.sink, Output):
            note(f"{self.file_kind or _file_word(self.view)}: {self.sink.path}")


def requested_view(options: Any, usual: str = "text", *, full: bool = False) -> RequestedView:
    """The view named by --view or a short form, else the `usual` one. Raises UsageError if two differ.

    `options`: of a verb with `view`, `out` and `as_json`.
    """
    named = {
        "--view": options.view,
        "--full": "text" if full else None,
        "--json": "json" if options.as_json else None,
    }
    given = [(option, name) for option, name in named.items() if name is not None]
    if len({name for _, name in given}) > 1:
        raise UsageError(f"{listing(option for option, _ in given)} select different views; use one")
    return RequestedView(given[0][1] if given else usual, None if options.out is None else Path(options.out))


def prepare(asked: RequestedView, folder: str, reads: Iterable[Path] = ()) -> Showing:
    """Find the view and reserve its output, before reading inputs.

    `reads`: files that must not be written over. Raises UsageError, and the errors of `claim_output`.
    """
    return open_sink(load_view(asked.view, folder), asked.out, reads)


def open_sink(view: View, out: Path | None, reads: Iterable[Path]) -> Showing:
    """Reserve the output of a view."""
    return Showing(view, reserve_output(out or STDOUT, _file_word(view), (*reads, STDIN), option="--out"))


def _file_word(view: View) -> str:
    return view.file_kind or view.name
