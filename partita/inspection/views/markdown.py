"""What a package or folder holds, as GitHub Markdown."""

from __future__ import annotations

from partita.inspection.document import document
from partita.partition_reports.render.markdown import markdown_view

VIEW = markdown_view("what a package holds, as Markdown", document)
