"""The pages of docs/ that are made from code: the JSON Schema of every record that is written, and the list of reasons.

To write them all again: python -m tools.published docs
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
    "nowhere": "no source says where the node runs",
    "line": "a log line names the node",
    "vague_line": "a log line names the node, without the detail",
    "blank_line": "a log line with an empty node name",
    "graph_line": "a log line about the graph",
    "alone": "experiments on the node in isolation",
    "together": "experiments on the node in isolation, several changes together",
    "forms": "experiments with other nodes of the operator",
    "alone_said": "what the provider said when it failed on the node in isolation",
    "alone_left": "experiments on the node in isolation, which the provider leaves before it fails on the graph",
    "part": "bisection: the smallest part that the provider does not load",
    "budget": "a budget, and no other cause",
    "origin": "the file has no such node",
    "entry": "the status of the provider",
    "nothing": "nothing",
}
PRECEDENCE_HEAD = """## Which reason goes first

When several apply, the row that stands first decides; within a row, the code that stands first. The table is
`partita/diagnosis/precedence.py`.

| | codes | when this shows it | why it stands here |
|---|---|---|---|"""
REASONS_HEAD = """# Reason codes

Why a node is not on the first provider of the chain. The list grows with the reasons that Partita can prove; what it
cannot prove is `unexplained`, and counted.

Every reason is asked about every such node. Of those that apply, the one that stands first in the table at the end of
this page is given, with its evidence:

| evidence | means |
|---|---|
| logged | ONNX Runtime or the provider said so in its log |
| probed | an experiment on the installed ONNX Runtime shows it |
| derived | it follows from other facts of the run |
| none | nothing shows it |

A reason of level *provider* is about a provider that is not there at all, and holds for every node; one of level *node*
is about that node.

This page is generated from `partita/diagnosis/reasons/`: to write it again, run
`python -m tools.published docs`.

## How experiments are made

A log line says that no kernel was found, and not whether operator, version or type is missing; some providers say
nothing at all. So `place`, and `generate` with a report, make experiments on nodes that fell back, where neither
the log nor a pin tells the cause:

- **One node in isolation.** The node becomes a model of its own, with the types, sizes and constants that it has in the
  graph (large constants as zeros). The preferred provider gets it, with the CPU provider behind it, and nothing is
  run: the question is who takes it. A changed node that it claims is also run once, where all inputs are floats of
  known sizes: one that it claims and cannot run counts as failed. In a dry run it is run on the CPU provider, beside
  the original node: one that fails there, or computes something else after a change of opset, rank or sizes, is
  invalid; one that cannot be run there is "placed, not run" and no remedy follows from it. Nodes that differ in their
  names only are one experiment. A provider that compiles gets a Neg beside the node, because some take no partition
  of a single node; the evidence says so. Where the node reads constants alone, the Neg has an input of its own,
  because some open no graph without one. What other nodes of the model read is no output of the experiment if the Neg
  reads it.
- **Another option of the provider.** Some options let a provider take more than it does by default
  (`webgpu.enableInt64=1`, `qnn.offload_graph_io_quantization=0`). One that matters to such a node, and that had
  another value in the run, is tried before anything of the node is changed; and, where nothing helps, together with
  one change of the node (24 at most) and with other nodes of the operator (three).
- **One factor at a time.** When it is not taken as it is, the same node is tried with fixed sizes (those of
  the run, and 1 where it has 0 or none), with the sizes of its outputs declared where they follow from values, with
  other element types, as other opsets have the operator, without each attribute that can go and with other values of
  it, and with other inputs: an optional one left out, one made constant, another rank. An attribute that has another
  name in every type (`keys_strings`, `keys_int64s`) goes along with the type. What makes the provider take it is
  the cause; when several things do, it is the first in this order, declared sizes last. When no single change helps,
  two are made together, at most 36 of such combinations, those with an option among them; the evidence says how many
  of these were left out. Three and more changes at once are not tried. Among them is each
  opset that does not know an attribute or an optional input of the node, without it.
- **Other nodes of the operator.** With these go up to 26 other nodes of the operator, of the same version (6 where
  the provider compiles), as the support tables have them: in the node's own types, then in others. When no change
  helped, they tell an operator that the provider lacks from one of which it lacks the type or the form.
- **No more than decides.** A provider that compiles takes long over each experiment. There, once a change helped,
  changes of a later factor are left out, and once a combination or another node of the operator was taken, the rest of
  them.
- **The nodes around it.** A node that is claimed in isolation, and not in the graph, is tried with each node next to it
  (six at most) and with all of them (64 nodes and 64 MiB of weights at most); nodes further away are not tried. Of
  equal nodes the first four are tried so; the evidence names the first of these with which it is no longer taken.
- **A graph that is rejected as a whole** is bisected down to the smallest part that the
  provider does not open; then what is left without that part, until the rest opens, five parts are found, 15 seconds
  have gone, or the time is up. If a part is a node or a few, experiments follow on them. A provider whose native code
  ends the process is left out of a second try, and its graph is cut in the same way.
- **In a child process.** A provider that crashes or hangs over an experiment ends the child, not the report: the
  crash, with its signal, is the answer to that experiment, and the next ones are made in a new child. A crash
  counts only when it happens in a fresh process.
- **Within a budget.** After `--probe-seconds` (120 unless given, 0 for no experiments) what is missing stays
  missing, and the report names the nodes. Every operator has its first experiment before any has its second. A hang
  is given up after 20 seconds, and after 60 when it is tried once more at the end; the start of the provider after 60.
- **Known answers are kept**, per build of ONNX Runtime, provider, options and device, as JSON in the user's cache
  folder (`~/.cache/partita/probes`, `$XDG_CACHE_HOME/partita/probes`, `~/Library/Caches/partita/probes` on macOS,
  `%LOCALAPPDATA%\\partita\\probes` on Windows). `PARTITA_CACHE_DIR=<folder>` keeps them elsewhere,
  `PARTITA_CACHE_DIR=` nowhere. The folder can be deleted at any time.

What they cannot show: what a provider does with a node because of nodes further away (then all that was tried is taken,
and the reason is `not_claimed`), whether the node's results are right or fast, and what depends on the values of large
weights. A node whose input types are not known cannot be tried; the report says so.
"""


def schema_text(record: Any) -> str:
    """The JSON Schema of a record, as docs/ holds it; of several records, any one."""
    return json.dumps(TypeAdapter(record).json_schema(by_alias=True), indent=1, ensure_ascii=False) + "\n"


def reasons_text() -> str:
    """The list of reasons, as docs/reasons.md holds it."""
    return "\n".join([REASONS_HEAD, *(describe(reason) for reason in load_reasons()), *precedence_text()])


def precedence_text() -> Iterator[str]:
    """The table of precedence, row by row."""
    yield PRECEDENCE_HEAD
    for number, rank in enumerate(PRECEDENCE, 1):
        codes = ", ".join(f"`{code}`" for code in rank.codes)
        yield f"| {number} | {codes} | {GROUNDS[rank.ground]} | {rank.because} |"
    yield ""


def describe(reason: Reason) -> str:
    """One reason with its example."""
    example = reason.example
    _, finding = explain(example)
    shown = f"{finding.kind}: {finding.evidence}"
    return (
        f"## {reason.code}\n\n"
        f"{reason.title}. Level: {reason.level}.\n\n"
        f"- **Applies when** {reason.condition}.\n"
        f"- **Evidence it needs:** {reason.needs}.\n"
        f"- **What to do:** {reason.remedy}.\n\n"
        f"Example: `{example.node}` ({example.op_type}) falls back from {example.skipped.provider} "
        f"to {example.provider}.\n\n"
        f"```\n{shown}\n```\n"
    )


def _of(record: Any) -> Callable[[], str]:
    return lambda: schema_text(record)


# What makes each page, by the name of its file.
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
