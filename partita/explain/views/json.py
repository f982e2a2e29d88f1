"""Everything a report knows about one node, as JSON."""

from __future__ import annotations

from partita.partition_reports.render.view import json_view

VIEW = json_view("everything about one node, as JSON")
