"""What is different between two reports, as JSON."""

from __future__ import annotations

from partita.partition_reports.render.view import json_view

VIEW = json_view("what changed in another report, as JSON")
