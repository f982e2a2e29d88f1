"""The difference of two support tables, as GitHub Markdown."""

from __future__ import annotations

from partita.partition_reports.render.markdown import markdown_view
from partita.support.diff.document import document

VIEW = markdown_view("the difference of two support tables as Markdown", document, folded=("tables", "versions"))
