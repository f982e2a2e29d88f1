"""Types of the arithmetic of a package: 16-bit floats, or quantised weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from partita.diagnosis.graphs import COMPILED
from partita.dtypes import EXACT, PRECISIONS, bits_of
from partita.observations.text_format import listing, short_provider
from partita.partition_reports.groups import op_type_of, provider_of, ran_by
from partita.partition_reports.outcome import used_phases
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.sections.model import Block, Line, Section, Table, numbers, table

MOVING = frozenset(
    {
        *("Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "MemcpyFromHost"),
        *("MemcpyToHost", "Pad", "Reshape", "ScatterElements", "ScatterND", "Slice", "Split", "Squeeze", "Tile"),
        *("Transpose", "Unsqueeze"),
    }
)
"""Operators without arithmetic; they count only if they read a weight."""
QUANTISED = re.compile(r"int\d+")
"""int8 and int4 for packages; other bit widths for folders of other exporters."""
AS_PACKED, TO_INTEGERS, INSIDE = "quantised", "quantised, int8 activations", "compiled"
RESTORED, FLOATS = "dequantised first", "floating point"
ORDER = (AS_PACKED, TO_INTEGERS, INSIDE, RESTORED, FLOATS)
WEIGHTS = {
    **dict.fromkeys(("MatMulNBits", "MatMulNBitsMlp", "MatMulNBitsQkv", "GatherBlockQuantized", "QMoE"), AS_PACKED),
    **dict.fromkeys(("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), TO_INTEGERS),
    "DequantizeLinear": RESTORED,
    **dict.fromkeys(("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MoE"), FLOATS),
}
"""Operator that reads a weight, including operators from provider fusions -> form of the weight in its arithmetic."""
Kind = tuple[str, ...]
"""Operator, its arithmetic or the format of its weights, further properties, provider."""
Counts = Counter[Kind]


def floats_section(report: Report) -> Section | None:
    """16-bit arithmetic; None for a package of another precision, and if the types are unknown."""
    narrow = None if report.package is None else PRECISIONS.get(report.package.precision)
    phases = used_phases(report)
    if narrow is None or narrow.bits is not None or narrow is EXACT:
        return None
    counted = [_count_floats(phase) for phase in phases]
    compiled = {provider_of(node) for phase in phases for node in phase.nodes if node.op_type == COMPILED}
    text = "compiled nodes and does not report the type of their arithmetic"
    blocks: list[Block] = [Line(f"{short_provider(provider)} {text}.") for provider in sorted(compiled)]
    if any(counted):
        heads = ("operator", "arithmetic", "weight in file", "provider")
        blocks.append(_table("Nodes by type of arithmetic", heads, phases, counted, _float_order))
    return Section("arithmetic", "16-bit arithmetic", tuple(blocks)) if blocks else None


def quantised_section(report: Report) -> Section | None:
    """Quantised weights; None for a package of another precision, and if no nodes are known."""
    phases = used_phases(report)
    if report.package is None or not QUANTISED.fullmatch(report.package.precision) or not phases:
        return None
    counted = [_count_quantised(phase) for phase in phases]
    if not any(counted):
        return Section("packed", "Quantised weights", (Line("No node computes with quantised weights.", tone="bad"),))
    inside = sorted({short_provider(provider) for counts in counted for _, how, provider in counts if how == INSIDE})
    text = "compiled the quantised weights and does not report their use"
    blocks: list[Block] = [Line(f"{listing(inside)} {text}.")] if inside else []
    heads = ("operator", "weights", "provider")
    blocks.append(_table("Matrix products and embeddings", heads, phases, counted, lambda kind: ORDER.index(kind[1])))
    return Section("packed", "Quantised weights", tuple(blocks))


def _table(
    caption: str,
    heads: Iterable[str],
    phases: Sequence[Phase],
    counted: Sequence[Counts],
    order: Callable[[Kind], Any],
) -> Table:
    """One row per kind, with its nodes in each phase."""
    kinds = sorted({kind for counts in counted for kind in counts}, key=lambda kind: (order(kind), kind))
    rows = [
        (*(text or "-" for text in kind[:-1]), short_provider(kind[-1]), *(str(counts[kind]) for counts in counted))
        for kind in kinds
    ]
    return table(caption, (*heads, *numbers(*(f"{phase.name} nodes" for phase in phases))), rows)


def _count_floats(phase: Phase) -> Counts:
    """Nodes that compute with floats, or read float weights, by kind."""
    return Counter(
        (op_type_of(node), node.element_type, node.matrix_type or "", provider_of(node))
        for node in phase.nodes
        if node.element_type is not None and (node.op_type not in MOVING or node.matrix_type is not None)
    )


def _float_order(kind: Kind) -> tuple[int, bool]:
    """Narrow types first, nodes with a weight of another type before others."""
    return bits_of(kind[1]) or 0, kind[2] in ("", kind[1])


def _count_quantised(phase: Phase) -> Counts:
    """Nodes that read weights, by kind; a compiled node counts as its parts."""
    found: Counts = Counter()
    rows = ran_by(phase)
    for node in phase.nodes:
        if node.op_type in WEIGHTS:
            found[node.op_type, WEIGHTS[node.op_type], provider_of(node)] += 1
            continue
        inside = [row.op_type for row in rows.get(node.name, ()) if row.op_type in WEIGHTS]
        reads = any(WEIGHTS[operator] != FLOATS for operator in inside)  # its products may read dequantised weights
        for operator in inside:
            found[operator, INSIDE if reads else FLOATS, provider_of(node)] += 1
    return found
