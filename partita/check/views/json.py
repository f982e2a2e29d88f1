"""The outcome of a check, as JSON."""

from __future__ import annotations

from partita.partition_reports.render.view import json_view

VIEW = json_view("the outcome of a check, as JSON")
