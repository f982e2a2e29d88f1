"""What docs/ says about reports in full: the JSON Schema and the list of reasons, made from the code that uses them.

To write both again: python -m partita.partition_reports.published docs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from partita.partition_reports.reasons.base import Reason, load_reasons
from partita.partition_reports.records import json_schema

REASONS_HEAD = """# Reason codes

Why a node is not on the first provider of the chain. The list grows with the reasons that Partita can prove; what it
cannot prove is `unexplained`, and counted.

Every reason is asked about every such node, and the one with the strongest evidence is given:

| evidence | means |
|---|---|
| logged | ONNX Runtime or the provider said so in its log |
| probed | an experiment on the installed ONNX Runtime shows it |
| derived | it follows from other facts of the run |
| none | nothing shows it |

A reason of level *provider* is about a provider that is not there at all, and holds for every node; one of level *node*
is about that node.

This page is generated from `partita/partition_reports/reasons/`: to write it again, run
`python -m partita.partition_reports.published docs`.
"""


def schema_text() -> str:
    """The JSON Schema of a report, as docs/report.schema.json holds it."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def reasons_text() -> str:
    """The list of reasons, as docs/reasons.md holds it."""
    return "\n".join([REASONS_HEAD, *(describe(reason) for reason in load_reasons())])


def describe(reason: Reason) -> str:
    """One reason with its example."""
    example = reason.example
    finding = reason.decide(example)
    shown = f"{finding.kind}: {finding.evidence}" if finding else "no finding"
    return (
        f"## {reason.code}\n\n"
        f"{reason.title}. Level: {reason.level}.\n\n"
        f"- **Applies when** {reason.condition}.\n"
        f"- **Evidence it needs:** {reason.needs}.\n"
        f"- **What to do:** {reason.remedy}.\n\n"
        f"Example: `{example.node}` ({example.op_type}) is wanted on {example.wanted.provider} "
        f"and runs on {example.provider}.\n\n"
        f"```\n{shown}\n```\n"
    )


def main(folder: Path) -> None:
    """Write both files to `folder`."""
    (folder / "report.schema.json").write_text(schema_text(), encoding="utf-8")
    (folder / "reasons.md").write_text(reasons_text(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
