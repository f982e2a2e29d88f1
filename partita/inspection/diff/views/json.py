"""The difference of two packages, as JSON."""

from __future__ import annotations

from partita.partition_reports.render.view import json_view

VIEW = json_view("the difference of two packages as JSON")
