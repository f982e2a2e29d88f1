"""A support table, as one HTML page."""

from __future__ import annotations

from partita.partition_reports.render.html import html_view
from partita.support.sections import document

VIEW = html_view("a support table as one page for a browser", document)
