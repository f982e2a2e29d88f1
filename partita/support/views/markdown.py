"""A support table, as GitHub Markdown."""

from __future__ import annotations

from partita.partition_reports.render.markdown import markdown_view
from partita.support.sections import document

VIEW = markdown_view("a support table as Markdown", document, unfold=True)
