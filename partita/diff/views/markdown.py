"""What is different between two reports, as Markdown for a pull request."""

from __future__ import annotations

from partita.diff.document import document
from partita.partition_reports.render.markdown import markdown_view

VIEW = markdown_view(
    "what changed in another report, as Markdown for a comment", document, folded=("reports", "around", "renamed")
)
