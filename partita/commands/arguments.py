"""Arguments and outputs of several verbs: prompts, token ids, the package of a MODEL; files, stdout and views."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.commands.terminal import TERMINAL, Bars, note, stdout_console, write_stdout_bytes
from partita.errors import ReportError, UsageError
from partita.files import Output, reserve
from partita.observations.text_format import listing
from partita.options.fields import PathText, group, input_paths, path_of
from partita.options.groups import ForeignFolder, SourceOptions, ViewOptions
from partita.partition_reports.render.show import load_view
from partita.providers.resolve import parse_chain
from partita.remedies import shell

if TYPE_CHECKING:
    from partita.options.generation import GenerateCommand
    from partita.options.placement import PlaceCommand
    from partita.partition_reports.render.show import View

STDOUT = Path("-")
SHOWN_BY_REPORT = ("report", "result", "support table")
"""Kinds of files that `partita report show` reads."""
SUFFIXES = {".html": "html", ".json": "json", ".md": "markdown"}
"""View of an output file by its suffix."""


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts, with - replaced by the text of stdin, which is UTF-8. Raises UsageError."""
    if not given:
        raise UsageError("no prompt; give one, or - to read it from stdin")
    if given.count("-") > 1:
        raise UsageError("- is given more than once; stdin holds one prompt")
    return [_read_stdin() if prompt == "-" else prompt for prompt in given]


def parse_ids(prompt: str) -> list[int]:
    """Token ids as --token-ids has them, between commas or blanks. Raises UsageError, also for nothing between two
    commas: a value that a script left out would make a shorter prompt.
    """
    parts = [part.split() for part in prompt.split(",")]
    words = [word for part in parts for word in part]
    if (len(parts) > 1 and not all(parts)) or not all(re.fullmatch("-?[0-9]{1,20}", word) for word in words):
        raise UsageError(f"--token-ids: {prompt[:40]!r} is not a list of token ids such as 1,45,7")
    return [int(word) for word in words]


def _read_stdin() -> str:
    """The text of stdin without one trailing newline, which echo and editors add. Raises UsageError."""
    if sys.stdin is None:
        raise UsageError("prompt -: stdin is closed; give the prompt as an argument")
    if sys.stdin.isatty():
        note("note: reading the prompt from the terminal, until Ctrl-D on a line of its own")
    from partita.runtime.generate.text.tokens import MOST_BYTES

    raw = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise UsageError(f"stdin has more than {MOST_BYTES:,} bytes, the maximum for a prompt; shorten it")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 (byte {error.start}); convert it first, e.g. with iconv") from error
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")


def package_of(model: PathText, options: SourceOptions) -> Path:
    """The folder that runs MODEL: itself, or the package that it is exported to for the first provider of the chain.

    `options`: those of the verb, with `providers` or `chains`. Raises as `folder_of`.
    """
    chain = getattr(options, "providers", None) or next(iter(getattr(options, "chains", None) or ()), None)
    by_library = getattr(options, "provider_libraries", None)
    target = parse_chain(chain)[0].name if isinstance(chain, str) and not by_library else None
    from partita.library.model_cache import folder_of

    source = os.fspath(model)
    foreign = group(options, ForeignFolder) if isinstance(options, ForeignFolder) else None
    with Bars() as bars:
        return folder_of(
            source,
            options.precision,
            target,
            revision=options.revision,
            foreign=foreign,
            progress=bars,
            audience=TERMINAL,
        )


# --- outputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stdout:
    """stdout as the output of a report or page: `-`."""

    path: Path = STDOUT

    def write(self, text: str) -> None:
        """Write `text` in UTF-8 on any terminal; a closed pipe is no error."""
        write_stdout_bytes(text.encode("utf-8"))


Sink = Output | Stdout


def reserve_output(path: Path, kind: str, reads: Iterable[Path], *, option: str) -> Sink:
    """The output for `path`, reserved; `-` is stdout. Raises the errors of `partita.files`.

    `reads`: files and folders that must not be written over, and with ONNX files those of their weights.
    """
    if path == STDOUT:
        return Stdout()
    reads = tuple(reads)
    weights = (file for read in reads if read.suffix == ".onnx" for file in _data_files(read))
    return reserve(path, kind, (*reads, *weights), option=option)


def _data_files(model: Path) -> tuple[Path, ...]:
    """Files with the weights of an ONNX file; empty if it cannot be read, which is reported when it is opened."""
    from partita.runtime.place.model_file import data_files, read_light

    try:
        return tuple(model.parent / name for name in data_files(read_light(model)))
    except (TypeError, ValueError, OSError):
        return ()


def print_written(kind: str, path: Path | str) -> None:
    """Print the path of a report or result, and the shell command that shows it."""
    note(f"{kind}: {path} (show it with: {shell(('partita', 'report', 'show', str(path)))})")


def reserve_report(options: GenerateCommand | PlaceCommand, reads: Iterable[Path]) -> Sink | None:
    """The output of --report, reserved. Raises UsageError if it and another JSON object would both go to stdout."""
    if options.report is None:
        return None
    if options.as_json and str(options.report) in (str(STDOUT), "/dev/stdout"):
        raise UsageError(f"--report {options.report} and --json both write to stdout; give --report a file")
    return reserve_output(Path(options.report), "report", reads, option="--report")


@dataclass(frozen=True, slots=True)
class Showing:
    """A view and its checked output."""

    view: View
    sink: Sink
    file_kind: str = ""
    """Name of its file in messages; empty: that of the view."""

    def show(self, record: Any, source: Path | None = None) -> None:
        """Print the record at the width of the terminal, or write what a file of this view holds. Raises ReportError
        where the record lacks the data of the view, with the file that it comes from.
        """
        if self.view.print_to is not None and isinstance(self.sink, Stdout):
            self.view.print_to(record, stdout_console())
            return
        try:
            text = self.view.to_text(record)
        except ReportError as error:
            raise ReportError(f"{source}: {error}" if source else str(error)) from error
        self.sink.write(text)
        if isinstance(self.sink, Output) and self.file_kind in SHOWN_BY_REPORT:
            print_written(self.file_kind, self.sink.path)
        elif isinstance(self.sink, Output):
            note(f"{self.file_kind or self.view.file_kind or self.view.name}: {self.sink.path}")


def show_and_write(record: Any, view: View, sink: Sink | None, kind: str) -> None:
    """Show a record on stdout in a view, and write it as JSON to `sink`; to stdout only one of the two.

    Where one of the two fails, the other has the record. Raises its error.
    """
    with ExitStack() as showings:
        if sink is not None:
            showings.callback(Showing(load_view("json"), sink, kind).show, record)
        if not isinstance(sink, Stdout):
            showings.callback(Showing(view, Stdout()).show, record)


def requested_view(
    options: ViewOptions, usual: str = "text", *, full: bool = False, out: PathText | None = None
) -> str:
    """The view named by --view or a short form, else that of the suffix of `out`, else the `usual` one.

    Raises UsageError if two options differ.
    """
    named = {
        "--view": options.view,
        "--full": "text" if full else None,
        "--json": "json" if options.as_json else None,
    }
    given = {option: name for option, name in named.items() if name is not None}
    if len(set(given.values())) > 1:
        raise UsageError(f"{listing(given)} select different views; use one")
    by_suffix = SUFFIXES.get("" if out is None else Path(out).suffix, usual)
    return next(iter(given.values()), by_suffix)


def prepare(options: ViewOptions, views: str = "") -> Showing:
    """The view of a result, with its output reserved before reading inputs. `views`: module of another kind of record.

    Raises UsageError, and the errors of `reserve_output`.
    """
    view = load_view(requested_view(options, out=options.out), views or options.VIEWS)
    return open_sink(view, path_of(options.out), input_paths(options))


def open_sink(view: View, out: Path | None, reads: Iterable[Path]) -> Showing:
    """Reserve the output of a view."""
    return Showing(view, reserve_output(out or STDOUT, view.file_kind or view.name, reads, option="--out"))
