"""What is different between two reports, as one HTML page."""

from __future__ import annotations

from partita.diff.document import document
from partita.partition_reports.render.html import html_view

VIEW = html_view("what changed in another report, as one page for a browser", document)
