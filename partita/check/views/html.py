"""The outcome of a check, as one HTML page."""

from __future__ import annotations

from partita.check.document import document
from partita.partition_reports.render.html import html_view

VIEW = html_view("the outcome of a check, as one page for a browser", document)
