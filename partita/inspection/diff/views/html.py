"""The difference of two packages, as one HTML page."""

from __future__ import annotations

from partita.inspection.diff.document import document
from partita.partition_reports.render.html import html_view

VIEW = html_view("the difference of two packages as one page for a browser", document)
