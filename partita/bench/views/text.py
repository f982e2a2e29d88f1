"""A bench for a terminal: the verdict first, then the figures, then where the time goes."""

from __future__ import annotations

from partita.bench.sections import document
from partita.partition_reports.render.blocks import printer
from partita.partition_reports.render.terminal import terminal_view

render = printer(document)
VIEW = terminal_view("text", "a bench as tables for a terminal", render)
