"""The outcome of a check, as Markdown for a comment."""

from __future__ import annotations

from partita.check.document import document
from partita.partition_reports.render.markdown import markdown_view

VIEW = markdown_view("the outcome of a check, as Markdown for a comment", document)
