"""Everything a report knows about one node, as one HTML page."""

from __future__ import annotations

from partita.explain.document import document
from partita.partition_reports.render.html import html_view

VIEW = html_view("everything about one node, as one page for a browser", document)
