"""Pages of docs/ that are generated: the JSON Schema of every record, and the list of reasons.

Write them with: python -m tools.published docs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from partita.commands.results import printed
from partita.diagnosis.evidence import Ground
from partita.diagnosis.precedence import PRECEDENCE, explain
from partita.diagnosis.reasons.base import Reason, load_reasons
from partita.machine.records import MachineReport
from partita.package.folder import Manifest
from partita.partition_reports.records import Report

GROUNDS: dict[Ground, str] = {
    "pin": "a pin covers the node",
    "nowhere": "no source has the node's provider",
    "line": "a log line names the node and the cause",
    "vague_line": "a log line names the node, without the detail",
    "blank_line": "a log line with an empty node name",
    "graph_line": "a log line about the graph",
    "alone": "an experiment on the node in isolation",
    "together": "an experiment with several changes of the node",
    "forms": "experiments with other nodes of the operator",
    "alone_said": "the provider's error for the node in isolation",
    "alone_left": "the provider fails on the graph, and does not support the node in isolation",
    "part": "bisection of the graph",
    "budget": "a budget, and no other cause",
    "origin": "the ONNX file has no such node",
    "entry": "the provider did not start",
    "nothing": "no evidence",
}
PRECEDENCE_HEAD = """## Precedence

When several reasons apply, the first row of this table decides, and within a row the first code.

| | evidence | codes |
|---|---|---|"""
REASONS_HEAD = """# Reason codes

A reason code explains why a node is not on the preferred provider of the chain. Reference for `reason`, `evidence` and
`remedy` in reports. The page is generated: `python -m tools.published docs`.

| evidence | means |
|---|---|
| logged | ONNX Runtime or the provider logged it |
| probed | an experiment on the installed ONNX Runtime shows it |
| derived | it follows from other facts of the run |
| none | no source shows it |

A reason of level *provider* applies to every node, because the provider did not start. A reason of level *node*
applies to one node. When several reasons apply, the [precedence](#precedence) decides.

## Experiments

`place`, and `generate` with a report, run experiments on nodes that fell back without a logged cause or a pin. An
experiment opens a small model on the preferred provider, followed by the CPU provider, and records which one takes the
node. Experiments run after the model, in a child process, so a crash ends no report.

- **Isolation.** The node is a model of its own, with its types, sizes and constants (large constants are zeros). A
  changed node that the provider supports also runs once, if its inputs are floats of known sizes. A dry run cannot run
  it on the device: the report states "placed, not run", and suggests no remedy from it.
- **One change at a time.** Fixed sizes, declared output sizes, other element types, other opset versions, other
  attributes, other inputs or ranks, and provider options that are known to matter. The first change in this order after
  which the provider supports the node is the cause. Then pairs of changes are tried (at most 36), and other nodes of
  the operator (at most 26).
- **Neighbours.** A node that is supported in isolation and not in the graph is tried with its neighbours (six at most,
  then all, up to 64 nodes and 64 MiB of weights).
- **Bisection.** A graph that the provider does not open is bisected to the smallest part that fails: at most five parts
  and 15 seconds.
- **Time.** After `--probe-seconds` (default 120; 0: no experiments) the report lists the nodes without experiments. An
  experiment has 20 seconds, a second try 60, and the start of the provider
  60.
- **Cache.** Results are kept per ONNX Runtime build, provider, options and device in `~/.cache/partita/probes`
  (`$XDG_CACHE_HOME/partita/probes`; macOS: `~/Library/Caches/partita/probes`; Windows:
  `%LOCALAPPDATA%\\partita\\probes`). `PARTITA_CACHE_DIR=FOLDER` moves them, `PARTITA_CACHE_DIR=` turns the cache off.
  You can delete the folder at any time.

Experiments do not show the effect of more distant nodes (the reason is then `not_claimed`), whether results are correct
or fast, or effects of the values of large weights. Nodes with unknown input types are not tried.
"""


def schema_text(record: Any) -> str:
    """The JSON Schema of a record; a union stands for any of its records."""
    return json.dumps(TypeAdapter(record).json_schema(by_alias=True), indent=1, ensure_ascii=False) + "\n"


def reasons_text() -> str:
    """The text of docs/reasons.md."""
    return "\n".join([REASONS_HEAD, *(describe(reason) for reason in load_reasons()), *precedence_text()])


def precedence_text() -> Iterator[str]:
    """The table of precedence, row by row."""
    yield PRECEDENCE_HEAD
    for number, rank in enumerate(PRECEDENCE, 1):
        codes = ", ".join(f"`{code}`" for code in rank.codes)
        yield f"| {number} | {GROUNDS[rank.ground]} | {codes} |"
    yield ""


def describe(reason: Reason) -> str:
    """One reason with the evidence of its example."""
    _, finding = explain(reason.example)
    return (
        f"## {reason.code}\n\n"
        f"{reason.title}. Level: {reason.level}.\n\n"
        f"- **Applies when** {reason.condition}.\n"
        f"- **Evidence:** {reason.needs}.\n"
        f"- **Fix:** {reason.remedy}.\n\n"
        f"```\n{finding.kind}: {finding.evidence}\n```\n"
    )


def _of(record: Any) -> Callable[[], str]:
    return lambda: schema_text(record)


# File name -> function that returns its text.
PAGES: dict[str, Callable[[], str]] = {
    "reasons.md": reasons_text,
    "package.schema.json": _of(Manifest),
    "report.schema.json": _of(Report),
    "providers.schema.json": _of(MachineReport),
    **{f"{verb}.schema.json": _of(record) for verb, record in printed().items()},
}


def main(folder: Path) -> None:
    """Write every page to `folder`."""
    for name, text in PAGES.items():
        (folder / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
