"""Terminal output of verbs: progress, one-line notes, sizes and times as text.

stdout carries results only. Notes and progress go to stderr: bars on a terminal, else a line per long stage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, AnyStr, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from partita.export.progress import Stage, Unit, stage
from partita.library.api import Audience
from partita.observations.text_format import human_bytes
from partita.options.fields import with_flags
from partita.options.groups import ProgressOptions
from partita.process import drop_output

if TYPE_CHECKING:
    from partita.library.chain import Target
    from partita.observations.records import Record


ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Replacements of terminal control characters, which tokens of a model may contain."""
LONG_STAGE_SECONDS = 1.0
"""Minimum duration of a stage for a line without a terminal."""
shown_progress = ProgressOptions()
"""The options of the running verb."""
stdout_used = False
"""Whether a verb has written to stdout: an error as JSON must not follow a result."""


class _Console(Console):
    """rich's console without its exit with code 1 at a closed pipe."""

    def on_broken_pipe(self) -> None:
        """Continue without output; the exit code is that of the verb."""
        drop_output(1 if self.file is sys.stdout else 2)


stderr = _Console(stderr=True, highlight=False, soft_wrap=True)


def stdout_console() -> Console:
    """A console on stdout whose tables are as wide as the terminal."""
    return _Console(highlight=False)


def note(text: str) -> None:
    """Print a line on stderr, with options as flags. A full or closed stderr is no error."""
    with suppress(OSError):
        stderr.print(with_flags(text), markup=False)


def write_stdout(text: str) -> bool:
    """Write `text` to stdout and flush; False if stdout is a closed pipe (head, less), which is no error."""
    return _write_stream(sys.stdout, 1, text)


def write_stderr(text: str) -> bool:
    """Write a line to stderr; see `write_stdout`."""
    return _write_stream(sys.stderr, 2, text)


def write_stdout_bytes(data: bytes) -> bool:
    """Write bytes to stdout and flush; False if it is a closed pipe."""
    return write_stdout("") and _write_stream(sys.stdout.buffer, 1, data)


def _write_stream(stream: IO[AnyStr] | None, descriptor: int, text: AnyStr) -> bool:
    """Write to a standard stream and flush; False if it is a closed pipe."""
    global stdout_used
    if stream is None:  # a program without standard streams calls `run`
        return False
    stdout_used = stdout_used or (descriptor == 1 and bool(text))
    try:
        stream.write(text.translate(ESCAPED) if isinstance(text, str) and stream.isatty() else text)
        stream.flush()
    except BrokenPipeError:
        drop_output(descriptor)
        return False
    return True


def print_record(record: Record) -> bool:
    """Print a record as one JSON object on stdout; False if it is a closed pipe."""
    from partita.partition_reports.storage import to_json

    return write_stdout_bytes(to_json(record).encode())


def show_progress(options: ProgressOptions) -> None:
    """Use the options of the running verb; they also hold for the downloads of huggingface_hub."""
    global shown_progress
    shown_progress = options
    if not draws_progress():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read at its import


def draws_progress() -> bool:
    """Whether bars and spinners are drawn on stderr."""
    return stderr.is_terminal and not shown_progress.quiet


def note_stage(title: str, seconds: float) -> None:
    """Print a line for a finished stage: a long one without a terminal, every one with --verbose."""
    long = seconds >= LONG_STAGE_SECONDS and not stderr.is_terminal
    if not shown_progress.quiet and (long or shown_progress.verbose):
        note(f"{title.partition(' (Ctrl-C')[0]}: {seconds:.1f} s")


class Bars:
    """Progress bars on stderr, one per stage; lines of `note_stage` if bars are off."""

    def __init__(self) -> None:
        self.bars = Progress(
            SpinnerColumn(finished_text="done"),
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(show_speed=False),
            TextColumn("{task.fields[size]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=stderr,
            transient=True,
            disable=not draws_progress(),
        )

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.bars.stop()

    def start(self, title: str, total: int | None, unit: Unit) -> Stage:
        """Add a progress bar for a stage."""
        size = "" if total is None else human_bytes(total) if unit == "bytes" else f"{total:,} {unit}"
        return _Bar(self.bars, self.bars.add_task(title, total=total, size=size), title)

    def finish(self, stage: Stage, seconds: float) -> None:
        """Fill the bar of a stage that ended."""
        assert isinstance(stage, _Bar)
        note_stage(stage.title, seconds)
        self.bars.update(stage.task, total=1, completed=1)


@contextmanager
def busy(title: str) -> Iterator[None]:
    """Show a stage without a length."""
    with Bars() as bars, stage(bars, title, {}):
        yield


class _Bar:
    def __init__(self, bars: Progress, task: TaskID, title: str) -> None:
        self.bars, self.task, self.title = bars, task, title

    def advance(self, amount: int) -> None:
        self.bars.advance(self.task, amount)


def print_note(text: str) -> None:
    """Print a note on stderr."""
    note(f"note: {text}")


TERMINAL = Audience(print_note, busy)


def print_target_notes(target: Target) -> None:
    """Print notes on stderr before a model is opened."""
    for line in target.opening_notes:
        print_note(line)
