"""Types of the arithmetic of a package: 16-bit floats, or quantised weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from partita.diagnosis.graphs import COMPILED
from partita.dtypes import EXACT, PRECISIONS, bits_of
from partita.observations.text_format import listing, plural, short_provider
from partita.partition_reports.groups import op_type_of, provider_of, ran_by
from partita.partition_reports.outcome import used_phases
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.sections.model import Block, Line, Section, Table, numbers, table

CAST = "Cast"
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
INTEGERS = frozenset({"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"})
"""Operators of `PACKED` that multiply integers with integers, so that activations are quantised."""
PACKED = INTEGERS | {"MatMulNBits", "MatMulNBitsMlp", "MatMulNBitsQkv", "GatherBlockQuantized", "QMoE"}
"""Operators that read quantised weights, including operators from provider fusions."""
RESTORING = frozenset({"DequantizeLinear"})
"""Operators that dequantise weights for other nodes; compilers fuse them with these nodes."""
FLOATING = frozenset({"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MoE"})
"""Matrix products in floating point."""
KNOWN = PACKED | RESTORING | FLOATING
AS_PACKED, INSIDE, RESTORED, FLOATS = "quantised", "compiled", "dequantised first", "floating point"
ORDER = (AS_PACKED, INSIDE, RESTORED, FLOATS)
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
    if not any(counted) and not compiled:
        return None
    text = "compiled nodes and does not report the type of their arithmetic"
    blocks: list[Block] = [
        Line(_describe_floats(narrow.dtype, counts, listing(names)))
        for names, counts in _equal_counts(phases, counted)
        if counts
    ]
    blocks += [Line(f"{short_provider(provider)} {text}.") for provider in sorted(compiled)]
    if any(counted):
        heads = ("operator", "arithmetic", "weight in file", "provider")
        blocks.append(_table("Nodes by type of arithmetic", heads, phases, counted, _float_order))
    return Section("arithmetic", "16-bit arithmetic", tuple(blocks))


def quantised_section(report: Report) -> Section | None:
    """Quantised weights; None for a package of another precision, and if no nodes are known."""
    phases = used_phases(report)
    if report.package is None or not QUANTISED.fullmatch(report.package.precision) or not phases:
        return None
    counted = [_count_quantised(phase) for phase in phases]
    if not any(counted):
        return Section("packed", "Quantised weights", (Line("No node computes with quantised weights.", tone="bad"),))
    blocks: list[Block] = [
        Line(_describe_quantised(report.package.precision, counts, names[-1]))
        for names, counts in _equal_counts(phases, counted)
    ]
    inside = sorted({short_provider(provider) for counts in counted for _, how, provider in counts if how == INSIDE})
    if inside:
        blocks.append(Line(f"{' and '.join(inside)} compiled the quantised weights and does not report their use."))
    heads = ("operator", "weights", "provider")
    blocks.append(_table("Matrix products and embeddings", heads, phases, counted, lambda kind: ORDER.index(kind[1])))
    return Section("packed", "Quantised weights", tuple(blocks))


def _equal_counts(phases: Sequence[Phase], counted: Sequence[Counts]) -> Iterator[tuple[list[str], Counts]]:
    """Names of phases with their counts; all phases together if the counts are equal."""
    names = [str(phase.name) for phase in phases]
    if all(counts == counted[-1] for counts in counted):
        yield names, counted[-1]
    else:
        yield from (([name], counts) for name, counts in zip(names, counted, strict=True))


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


def _describe_floats(narrow: str, counts: Counts, where: str) -> str:
    """Summary in one sentence."""
    by_type, stored = Counter[str](), Counter[str]()
    for (operator, dtype, matrix, _), count in counts.items():
        if operator != CAST and operator not in MOVING:
            by_type[dtype] += count
            stored[dtype] += count if matrix == narrow != dtype else 0
    casts = sum(count for kind, count in counts.items() if kind[0] == CAST)
    computing = by_type.pop(narrow, 0)
    parts = [f"{plural(computing, 'node')} in {narrow}" if computing else f"no node in {narrow}"]
    for dtype, count in sorted(by_type.items()):
        weights = f" ({stored[dtype]} of them with {narrow} weights in the file)" if stored[dtype] else ""
        parts.append(f"{count} in {dtype}{weights}")
    between = f"; {plural(casts, 'Cast node')} in every run" if casts else ""
    return f"{where}: {listing(parts)}{between}."


def _count_quantised(phase: Phase) -> Counts:
    """Nodes that read weights, by kind; a compiled node counts as its parts."""
    found: Counts = Counter()
    rows = ran_by(phase)
    for node in phase.nodes:
        if node.op_type in KNOWN:
            how = AS_PACKED if node.op_type in PACKED else RESTORED if node.op_type in RESTORING else FLOATS
            found[node.op_type, how, provider_of(node)] += 1
            continue
        inside = [row.op_type for row in rows.get(node.name, ()) if row.op_type in KNOWN]
        reads = any(operator not in FLOATING for operator in inside)  # its products may read dequantised weights
        for operator in inside:
            found[operator, INSIDE if reads else FLOATS, provider_of(node)] += 1
    return found


def _describe_quantised(precision: str, counts: Counts, phase: str) -> str:
    """Summary in one sentence."""
    by_how = Counter[str]()
    for (operator, how, _), count in counts.items():
        by_how[how] += 0 if how == INSIDE and operator in FLOATING else count
    packed = by_how[AS_PACKED] + by_how[INSIDE]
    restored = f"; {plural(by_how[RESTORED], 'node')} dequantise weights first" if by_how[RESTORED] else ""
    floats = f"; {plural(by_how[FLOATS], 'product')} in floating point" if by_how[FLOATS] else ""
    whole = sum(count for kind, count in counts.items() if kind[0] in INTEGERS)
    rounded = f", {whole} of them as int8 with int8 activations" if whole else ""
    text = f"{plural(packed, 'node')} of {phase} read quantised weights of an {precision} package"
    return f"{text}{rounded}{restored}{floats}."
