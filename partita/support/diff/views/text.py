"""The difference of two support tables, for a terminal."""

from __future__ import annotations

from partita.partition_reports.render.blocks import printer
from partita.partition_reports.render.terminal import terminal_view
from partita.support.diff.document import document

render = printer(document)
VIEW = terminal_view("text", "the difference of two support tables for a terminal", render)
