"""The difference of two packages, as GitHub Markdown."""

from __future__ import annotations

from partita.inspection.diff.document import document
from partita.partition_reports.render.markdown import markdown_view

VIEW = markdown_view("the difference of two packages as Markdown", document)
