"""The few shapes the text view is made of: headings, lines and tables readable at 80 columns and without colour."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from partita.partition_reports.wording import clean

ROWS = 12
"""Most rows of a table; the rest is summed up in one line."""
FILE_COLUMNS = 100
"""Width of a view when it goes to a file."""
BOLD = Style(bold=True)
DIM = Style(dim=True)
PLAIN = Style()
ALARM = Style(bold=True, color="red")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and whether it holds numbers, which are set right and never wrapped."""

    title: str
    number: bool = True


NAME = Column("", number=False)


@dataclass(frozen=True, slots=True)
class Page:
    """A console that takes strings as they are: no markup, no control characters, nothing its encoding cannot write."""

    console: Console

    def text(self, line: str, style: Style = PLAIN) -> Text:
        """A string made harmless."""
        return Text(clean(line, self.console.encoding), style=style, overflow="fold")

    def heading(self, title: str) -> None:
        """An empty line and the title of a section."""
        self.console.print()
        self.console.print(self.text(title, BOLD))

    def line(self, line: str, *, indent: int = 2, style: Style = PLAIN) -> None:
        """One line or paragraph; what is wrapped stays indented."""
        for wrapped in self.text(line, style).wrap(self.console, max(self.console.width - indent, 20)):
            wrapped.rstrip()
            self.console.print(Text(" " * indent) + wrapped, soft_wrap=True)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values, values one below the other."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(self.text(name), self.text(value))
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], rest: str = "") -> None:
        """A table under the columns' headings; `rest` is a line below it on the rows that were left out."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style=BOLD)
        for column in columns:
            justify = "right" if column.number else "left"
            table.add_column(self.text(column.title), justify=justify, no_wrap=column.number, overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            table.add_row(*(self.text(cell) for cell in row))
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))
        if rest:
            self.line(rest, style=DIM)


def to_plain_text(render: Callable[[Console], None]) -> str:
    """What `render` prints, without colour, for a file."""
    stream = io.StringIO()
    render(Console(file=stream, width=FILE_COLUMNS, color_system=None, force_terminal=False, legacy_windows=False))
    return stream.getvalue()
