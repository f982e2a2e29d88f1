"""What a package or folder holds, for a terminal."""

from __future__ import annotations

from partita.inspection.document import document
from partita.partition_reports.render.blocks import printer
from partita.partition_reports.render.terminal import terminal_view

render = printer(document)
VIEW = terminal_view("text", "what a package holds", render)
