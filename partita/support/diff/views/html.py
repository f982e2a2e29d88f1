"""The difference of two support tables, as one HTML page."""

from __future__ import annotations

from partita.partition_reports.render.html import html_view
from partita.support.diff.document import document

VIEW = html_view("the difference of two support tables as one page for a browser", document)
