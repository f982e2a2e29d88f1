"""A support table, as JSON, as it is stored."""

from __future__ import annotations

from partita.partition_reports.render.view import View
from partita.partition_reports.storage import to_json

VIEW = View("json", ".json", "a support table as JSON", to_json)
