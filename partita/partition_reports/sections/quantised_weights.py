"""Nodes that compute with quantised weights, and nodes in floating point."""

from __future__ import annotations

import re
from collections import Counter

from partita.observations.text_format import plural, short_provider
from partita.partition_reports.file_nodes import ran_by
from partita.partition_reports.groups import provider_of
from partita.partition_reports.outcome import used_phases
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.sections.model import Block, Column, Line, Section, table, text_column

PRECISIONS = re.compile(r"int\d+")
"""int8 and int4 for packages; other bit widths for folders of other exporters."""
PACKED = frozenset(
    {
        "MatMulNBits",
        "MatMulNBitsMlp",
        "MatMulNBitsQkv",
        "GatherBlockQuantized",
        "QMoE",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul",
    }
)
"""Operators that read quantised weights, including operators from provider fusions."""
INTEGERS = frozenset({"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"})
"""Operators of `PACKED` that multiply integers with integers, so that activations are quantised."""
RESTORING = frozenset({"DequantizeLinear"})
"""Operators that dequantise weights for other nodes; compilers fuse them with these nodes."""
FLOATING = frozenset({"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MoE"})
"""Matrix products in floating point."""
KNOWN = PACKED | RESTORING | FLOATING

Kind = tuple[str, str, str]
"""Operator, format of the weights that it reads, provider."""
AS_PACKED, COMPILED, RESTORED, FLOATS = "quantised", "compiled", "dequantised first", "floating point"
ORDER = (AS_PACKED, COMPILED, RESTORED, FLOATS)


def section(report: Report) -> Section | None:
    """None for a package of another precision, and if no nodes are known."""
    phases = used_phases(report)
    if report.package is None or not PRECISIONS.fullmatch(report.package.precision) or not phases:
        return None
    counted = [_counted(phase) for phase in phases]
    kinds = list(dict.fromkeys(kind for counts in counted for kind in counts))
    if not kinds:
        return Section("packed", "Quantised weights", (Line("No node computes with quantised weights.", tone="bad"),))
    rows = [
        (operator, how, short_provider(provider)) + tuple(str(counts[operator, how, provider]) for counts in counted)
        for operator, how, provider in sorted(kinds, key=lambda kind: (ORDER.index(kind[1]), kind))
    ]
    heads = (
        text_column("operator"),
        text_column("weights"),
        text_column("provider"),
        *(Column(f"{phase.name} nodes") for phase in phases),
    )
    alike = all(counts == counted[-1] for counts in counted)
    summaries = [(counted[-1], phases[-1])] if alike else list(zip(counted, phases, strict=True))
    blocks: list[Block] = [Line(_summary(report.package.precision, counts, phase)) for counts, phase in summaries]
    inside = sorted({short_provider(provider) for _, how, provider in kinds if how == COMPILED})
    if inside:
        blocks.append(Line(f"{' and '.join(inside)} compiled the quantised weights and does not report their use."))
    blocks.append(table("Matrix products and embeddings", heads, rows))
    return Section("packed", "Quantised weights", tuple(blocks))


def _counted(phase: Phase) -> Counter[Kind]:
    """Nodes that read weights, by kind; a compiled node counts as its parts."""
    found: Counter[Kind] = Counter()
    rows = ran_by(phase)
    for node in phase.nodes:
        if node.op_type in KNOWN:
            found[node.op_type, _weight_format(node.op_type), provider_of(node)] += 1
            continue
        inside = [row.op_type for row in rows.get(node.name, ()) if row.op_type in KNOWN]
        reads = any(operator not in FLOATING for operator in inside)  # its products may read dequantised weights
        for operator in inside:
            found[operator, COMPILED if reads else FLOATS, provider_of(node)] += 1
    return found


def _weight_format(operator: str) -> str:
    """Format of the weights that an operator reads."""
    return AS_PACKED if operator in PACKED else RESTORED if operator in RESTORING else FLOATS


def _summary(precision: str, counts: Counter[Kind], phase: Phase) -> str:
    """Summary in one sentence."""
    by_how: Counter[str] = Counter()
    for (operator, how, _), count in counts.items():
        by_how[how] += 0 if how == COMPILED and operator in FLOATING else count
    packed = by_how[AS_PACKED] + by_how[COMPILED]
    restored = f"; {plural(by_how[RESTORED], 'node')} dequantise weights first" if by_how[RESTORED] else ""
    floats = f"; {plural(by_how[FLOATS], 'product')} in floating point" if by_how[FLOATS] else ""
    text = f"{plural(packed, 'node')} of {phase.name} read quantised weights of an {precision} package"
    whole = sum(count for (operator, _, _), count in counts.items() if operator in INTEGERS)
    rounded = f", {whole} of them as int8 with int8 activations" if whole else ""
    return f"{text}{rounded}{restored}{floats}."
