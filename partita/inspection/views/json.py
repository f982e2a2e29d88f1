"""What a package or folder holds, as JSON."""

from __future__ import annotations

from partita.partition_reports.render.view import json_view

VIEW = json_view("what a package holds, as JSON")
