"""Nodes of an fp16 or bf16 package that compute in 16 bits, and nodes that only read 16-bit weights."""

from __future__ import annotations

from collections import Counter

from partita.diagnosis.compiled_subgraphs import COMPILED
from partita.dtypes import EXACT, PRECISIONS, bits_of
from partita.observations.text_format import listing, plural, short_provider
from partita.partition_reports.groups import op_type_of, provider_of
from partita.partition_reports.outcome import used_phases
from partita.partition_reports.records import NodePlacement, Phase, Report
from partita.partition_reports.sections.model import Block, Column, Line, Section, table, text_column

TITLE = "16-bit arithmetic"
CAST = "Cast"
MOVING = frozenset(
    {
        "Concat",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "MemcpyFromHost",
        "MemcpyToHost",
        "Pad",
        "Reshape",
        "ScatterElements",
        "ScatterND",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
"""Operators without arithmetic; they count only if they read a weight."""

Kind = tuple[str, str, str, str]
"""Operator, type of its arithmetic, type of its weight in the file, provider."""


def section(report: Report) -> Section | None:
    """None for a package of another precision, and if the types are unknown."""
    narrow = None if report.package is None else PRECISIONS.get(report.package.precision)
    phases = used_phases(report)
    if narrow is None or narrow.bits is not None or narrow is EXACT:
        return None
    counted = [_counted(phase) for phase in phases]
    kinds = list(dict.fromkeys(kind for counts in counted for kind in counts))
    compiled = {provider_of(node): node for phase in phases for node in phase.nodes if node.op_type == COMPILED}
    if not kinds and not compiled:
        return None
    alike = all(counts == counted[-1] for counts in counted)
    names = [str(phase.name) for phase in phases]
    summaries = [(counted[-1], listing(names))] if alike else list(zip(counted, names, strict=True))
    blocks: list[Block] = [Line(_summary(narrow.dtype, *each)) for each in summaries if each[0]]
    blocks += [
        Line(f"{short_provider(provider)} compiled nodes and does not report the type of their arithmetic.")
        for provider in sorted(compiled)
    ]
    if kinds:
        heads = (
            text_column("operator"),
            text_column("arithmetic"),
            text_column("weight in file"),
            text_column("provider"),
            *(Column(f"{phase.name} nodes") for phase in phases),
        )
        ordered = sorted(kinds, key=lambda kind: (bits_of(kind[1]) or 0, kind[2] in ("", kind[1]), kind))
        rows = [
            (operator, dtype, stored or "-", short_provider(provider))
            + tuple(str(counts[operator, dtype, stored, provider]) for counts in counted)
            for operator, dtype, stored, provider in ordered
        ]
        blocks.append(table("Nodes by type of arithmetic", heads, rows))
    return Section("arithmetic", TITLE, tuple(blocks))


def _counted(phase: Phase) -> Counter[Kind]:
    """Nodes that compute with floats, or read float weights, by kind."""
    found: Counter[Kind] = Counter()
    for node in phase.nodes:
        if node.element_type is not None and _counts(node):
            found[op_type_of(node), node.element_type, node.matrix_type or "", provider_of(node)] += 1
    return found


def _counts(node: NodePlacement) -> bool:
    """Whether the node computes or reads a weight."""
    return node.op_type not in MOVING or node.matrix_type is not None


def _summary(narrow: str, counts: Counter[Kind], where: str) -> str:
    """Summary in one sentence."""
    by_type: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    casts = 0
    for (operator, dtype, matrix, _), count in counts.items():
        casts += count if operator == CAST else 0
        if operator != CAST and operator not in MOVING:
            by_type[dtype] += count
            stored[dtype] += count if matrix == narrow != dtype else 0
    computing = by_type.pop(narrow, 0)
    parts = [f"{plural(computing, 'node')} in {narrow}" if computing else f"no node in {narrow}"]
    for dtype, count in sorted(by_type.items()):
        weights = f" ({stored[dtype]} of them with {narrow} weights in the file)" if stored[dtype] else ""
        parts.append(f"{count} in {dtype}{weights}")
    between = f"; {plural(casts, 'Cast node')} in every run" if casts else ""
    return f"{where}: {listing(parts)}{between}."
