"""What a machine offers, as JSON."""

from __future__ import annotations

import json

from partita.machine.records import MachineReport
from partita.partition_reports.render.view import View


def _to_text(report: MachineReport) -> str:
    """In UTF-8: a name of a device is whatever its driver says."""
    text = json.dumps(report.model_dump(mode="json", by_alias=True), ensure_ascii=False, indent=2, allow_nan=False)
    return text + "\n"


VIEW = View("json", ".json", "what a machine offers, as JSON", _to_text)
