"""A bench as GitHub Markdown, for a comment of CI or a pull request."""

from __future__ import annotations

from partita.bench.sections import document
from partita.partition_reports.render.markdown import markdown_view

VIEW = markdown_view("a bench as Markdown, for a comment", document)
