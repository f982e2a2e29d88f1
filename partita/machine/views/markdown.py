"""What a machine offers, as Markdown for a comment."""

from __future__ import annotations

from partita.machine.document import document
from partita.partition_reports.render.markdown import markdown_view

VIEW = markdown_view("what a machine offers, as Markdown for a comment", document)
