"""What a machine offers, as one HTML page."""

from __future__ import annotations

from partita.machine.document import document
from partita.partition_reports.render.html import html_view

VIEW = html_view("what a machine offers, as one page for a browser", document)
