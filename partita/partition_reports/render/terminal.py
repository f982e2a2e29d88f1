"""Printing of text views: headings, paragraphs and tables at the width of a console."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from partita.observations.text_format import clean
from partita.partition_reports.render import layout
from partita.partition_reports.render.view import View
from partita.partition_reports.sections.model import Column

FILE_COLUMNS = 100
"""Width of a view in a file."""
BOLD = Style(bold=True)
DIM = Style(dim=True)
PLAIN = Style()
ALARM = Style(bold=True, color="red")
GOOD = Style(bold=True, color="green")
STYLES = {"head": BOLD, "rule": DIM, "row": PLAIN}


@dataclass(frozen=True, slots=True)
class Page:
    """A console for plain strings, without markup, control characters and unencodable characters."""

    console: Console

    def text(self, line: str, style: Style = PLAIN) -> Text:
        """A sanitised string with style."""
        return Text(self.harmless(line), style=style, overflow="fold")

    def harmless(self, line: str) -> str:
        """A sanitised string."""
        return clean(line, self.console.encoding)

    def heading(self, title: str) -> None:
        """Print an empty line and the title of a section."""
        self.blank()
        self.line(title, indent=0, style=BOLD)

    def blank(self) -> None:
        """Print an empty line."""
        self.console.print()

    def line(self, line: str, *, indent: int = 2, hang: int = 0, label: str = "", style: Style = PLAIN) -> None:
        """Print a paragraph with a label; wrapped lines are indented by `hang` more."""
        mark = "" if label.endswith("?") else ":"
        whole = self.harmless(f"{label}{mark} {line}" if label else line)
        lines = layout.paragraph(whole, self.console.width, indent=indent, hang=hang)
        for number, part in enumerate(lines):
            self.put(part, style, bold=indent + len(label) + 1 if label and number == 0 else 0)

    def put(self, line: str, style: Style = PLAIN, *, bold: int = 0) -> None:
        """Print a formatted line. `bold`: number of leading characters in bold."""
        text = Text(line, style=style)
        if bold:
            text.stylize(BOLD, 0, bold)
        self.console.print(text, soft_wrap=True)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names with aligned values."""
        safe = [(self.harmless(name), self.harmless(value)) for name, value in rows]
        for line in layout.pairs(safe, self.console.width):
            self.put(line)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], rest: str = "") -> None:
        """Print a table. `rest`: a line about omitted rows."""
        heads = [replace(column, title=self.harmless(column.title)) for column in columns]
        cells = [[self.harmless(cell) for cell in row] for row in rows]
        rule = "─" if self.harmless("─") == "─" else "-"
        for kind, line in layout.table(heads, cells, self.console.width, rule=rule):
            self.put(line, STYLES[kind])
        if rest:
            self.line(rest, style=DIM)


def terminal_view(name: str, summary: str, render: Callable[[Any, Console], None]) -> View:
    """The view that `render` prints to a console, or to a file without colour."""

    def to_text(record: Any) -> str:
        stream = io.StringIO()
        plain = Console(file=stream, width=FILE_COLUMNS, color_system=None, force_terminal=False, legacy_windows=False)
        render(record, plain)
        return stream.getvalue()

    return View(name, ".txt", summary, to_text, print_to=render)
