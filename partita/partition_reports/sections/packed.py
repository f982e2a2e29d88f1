"""Which nodes really compute with weights that are packed into integers, and what is left in floating point."""

from __future__ import annotations

import re
from collections import Counter

from partita.observations.text_format import plural, short_provider
from partita.partition_reports.groups import provider_of
from partita.partition_reports.outcome import used_phases
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.sections.model import Block, Column, Line, Section, table, words

PRECISIONS = re.compile(r"int\d+")
"""Of packages int8 and int4; of folders of other exporters any width, int2 for one."""
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
"""Operators that read packed weights, those among them into which providers fuse others."""
INTEGERS = frozenset({"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"})
"""Those of them that multiply integers on both sides: activations are rounded, whatever the others do."""
RESTORING = frozenset({"DequantizeLinear"})
"""Operators that make floats of packed weights, for others to read; compilers fold them into those."""
FLOATING = frozenset({"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MoE"})
"""Operators that do the same with weights, or with each other's results, in floating point."""
KNOWN = PACKED | RESTORING | FLOATING

Kind = tuple[str, str, str]
"""Operator, how it reads weights, provider."""
AS_PACKED, COMPILED, RESTORED, FLOATS = "packed", "compiled", "restored first", "floating point"
ORDER = (AS_PACKED, COMPILED, RESTORED, FLOATS)


def section(report: Report) -> Section | None:
    """None for a package of another precision, and where no node is known."""
    phases = used_phases(report)
    if report.package is None or not PRECISIONS.fullmatch(report.package.precision) or not phases:
        return None
    counted = [_counted(phase) for phase in phases]
    kinds = list(dict.fromkeys(kind for counts in counted for kind in counts))
    if not kinds:
        return Section("packed", "Packed weights", (Line("No node computes with packed weights.", tone="bad"),))
    rows = [
        (operator, how, short_provider(provider)) + tuple(str(counts[operator, how, provider]) for counts in counted)
        for operator, how, provider in sorted(kinds, key=lambda kind: (ORDER.index(kind[1]), kind))
    ]
    heads = (words("operator"), words("weights"), words("on"), *(Column(f"{phase.name} nodes") for phase in phases))
    alike = all(counts == counted[-1] for counts in counted)
    told = [(counted[-1], phases[-1])] if alike else list(zip(counted, phases, strict=True))
    blocks: list[Block] = [Line(_summary(report.package.precision, counts, phase)) for counts, phase in told]
    inside = sorted({short_provider(provider) for _, how, provider in kinds if how == COMPILED})
    if inside:
        blocks.append(
            Line(f"{' and '.join(inside)} compiled packed weights in, and does not say what it makes of them.")
        )
    blocks.append(table("Products and look-ups", heads, rows))
    return Section("packed", "Packed weights", tuple(blocks))


def _counted(phase: Phase) -> Counter[Kind]:
    """Nodes that read weights, by kind; a compiled node counts with the operators that it was compiled from."""
    found: Counter[Kind] = Counter()
    for node in phase.nodes:
        if node.op_type in KNOWN:
            found[node.op_type, _how(node.op_type), provider_of(node)] += 1
            continue
        inside = [operator for operator in node.replaces_op_types if operator in KNOWN]
        reads = any(operator not in FLOATING for operator in inside)  # then its products may read what is restored
        for operator in inside:
            found[operator, COMPILED if reads else FLOATS, provider_of(node)] += 1
    return found


def _how(operator: str) -> str:
    """How an operator reads weights."""
    return AS_PACKED if operator in PACKED else RESTORED if operator in RESTORING else FLOATS


def _summary(precision: str, counts: Counter[Kind], phase: Phase) -> str:
    """One sentence."""
    by_how: Counter[str] = Counter()
    for (operator, how, _), count in counts.items():
        by_how[how] += 0 if how == COMPILED and operator in FLOATING else count
    packed = by_how[AS_PACKED] + by_how[COMPILED]
    restored = f"; {plural(by_how[RESTORED], 'node')} restore floats first" if by_how[RESTORED] else ""
    left = f"; {plural(by_how[FLOATS], 'product')} in floating point" if by_how[FLOATS] else ""
    told = f"{plural(packed, 'node')} of {phase.name} read weights of an {precision} package as they are packed"
    whole = sum(count for (operator, _, _), count in counts.items() if operator in INTEGERS)
    rounded = f", {whole} of them as int8 with activations rounded to int8" if whole else ""
    return f"{told}{rounded}{restored}{left}."
