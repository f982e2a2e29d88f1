"""How a record is shown: in the view of that name, on stdout or in a file. Every verb that shows one does it so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from partita.commands.outputs import STDOUT, Sink, Stdout, claim_output
from partita.commands.terminal import note, stdout_console
from partita.errors import ReportError, UsageError
from partita.files import STDIN, Output
from partita.observations.text_format import listing
from partita.options import PathText
from partita.partition_reports.render.view import load_view

if TYPE_CHECKING:
    from partita.partition_reports.render.view import View


@dataclass(frozen=True, slots=True)
class Asked:
    """The view that is asked for, and where it goes: None is stdout."""

    view: str = "text"
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class Showing:
    """A view, and a place that may be written."""

    view: View
    sink: Sink
    what: str = ""
    """What a file of it is called in messages; empty: as the view says."""

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
            hint = f" ({self.view.hint})" if self.view.hint else ""
            note(f"{self.what or _called(self.view)}: {self.sink.path}{hint}")


class ViewOptions(Protocol):
    """Options of a verb that has views."""

    @property
    def view(self) -> str | None:
        """Name of the view."""

    @property
    def out(self) -> PathText | None:
        """File for it; None: stdout."""

    @property
    def as_json(self) -> bool:
        """Short form of the view `json`."""


def asked(options: ViewOptions, *, brief: bool = False) -> Asked:
    """The view that is asked for by name or by a short form of it. Raises UsageError when two are."""
    named = {
        "--view": options.view,
        "--brief": "brief" if brief else None,
        "--json": "json" if options.as_json else None,
    }
    given = [(option, name) for option, name in named.items() if name is not None]
    if len({name for _, name in given}) > 1:
        raise UsageError(f"{listing(option for option, _ in given)} ask for different views; keep one")
    return Asked(given[0][1] if given else "text", None if options.out is None else Path(options.out))


def prepare(asked: Asked, folder: str, reads: Iterable[Path] = ()) -> Showing:
    """Find the view in its folder, and claim where it goes, before anything is read or run.

    `reads`: files that must not be written over. Raises UsageError, and what `partita.files.claim` raises.
    """
    return open_sink(load_view(asked.view, folder), asked.out, reads)


def open_sink(view: View, out: Path | None, reads: Iterable[Path]) -> Showing:
    """Claim where a view goes that is found already."""
    return Showing(view, claim_output(out or STDOUT, _called(view), (*reads, STDIN), option="--out"))


def _called(view: View) -> str:
    return view.what or view.name
