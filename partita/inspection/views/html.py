"""What a package or folder holds, as one HTML page."""

from __future__ import annotations

from partita.inspection.document import document
from partita.partition_reports.render.html import html_view

VIEW = html_view("what a package holds, as one page for a browser", document)
