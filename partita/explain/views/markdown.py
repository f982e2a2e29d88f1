"""Everything a report knows about one node, as Markdown for a comment."""

from __future__ import annotations

from partita.explain.document import document
from partita.partition_reports.render.markdown import markdown_view

VIEW = markdown_view("everything about one node, as Markdown for a comment", document)
