"""What a machine offers, for a terminal."""

from __future__ import annotations

from partita.machine.document import document
from partita.partition_reports.render.blocks import printer
from partita.partition_reports.render.terminal import terminal_view

render = printer(document)
VIEW = terminal_view("text", "what a machine offers", render)
