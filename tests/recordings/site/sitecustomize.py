"""Makes every process of a recorded run write the facts of its reports to the file that PARTITA_RECORD_TO names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

TO = os.environ.get("PARTITA_RECORD_TO")


def record_reports(to: str) -> None:
    """From now on, write the facts of every report that this process builds."""
    from pydantic import TypeAdapter

    from partita.library import run_report
    from partita.observations.facts import RunFacts
    from partita.partition_reports.build import build_report

    def build(facts: RunFacts, **given: Any) -> Any:
        made = build_report(facts, **given)
        records = {key: given.get(key) for key in ("environment", "package", "model", "request")}
        records["played"] = given.get("device")
        found = {
            **{key: None if record is None else record.model_dump(mode="json") for key, record in records.items()},
            "facts": TypeAdapter(RunFacts).dump_python(facts, mode="json"),
            "chain": [entry.model_dump(mode="json") for entry in given["chain"]],
        }
        Path(to).write_text(json.dumps(found, separators=(",", ":"), sort_keys=True), encoding="utf-8")
        return made

    vars(run_report)["build_report"] = build


if TO:
    record_reports(TO)
