"""A support table, for a terminal."""

from __future__ import annotations

from partita.partition_reports.render.blocks import printer
from partita.partition_reports.render.terminal import terminal_view
from partita.support.sections import document

render = printer(document)
VIEW = terminal_view("text", "a support table for a terminal", render)
