"""Which nodes really compute with the packed weights of an int8 or int4 package, and what is left in floating point."""

from __future__ import annotations

from collections import Counter

from partita.observations.text_format import plural, short_provider
from partita.partition_reports.groups import provider_of
from partita.partition_reports.outcome import used_phases
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.sections.model import Block, Column, Line, Section, table, words

PRECISIONS = ("int8", "int4")
PACKED = frozenset({"MatMulNBits", "MatMulNBitsMlp", "MatMulNBitsQkv", "GatherBlockQuantized", "QMoE"})
"""Operators that read packed weights, those among them into which providers fuse others."""
FLOATING = frozenset({"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MoE"})
"""Operators that do the same with weights, or with each other's results, in floating point."""


def section(report: Report) -> Section | None:
    """None for a package of another precision, and where no node is known."""
    phases = used_phases(report)
    if report.package is None or report.package.precision not in PRECISIONS or not phases:
        return None
    counted = [_counted(phase) for phase in phases]
    kinds = list(dict.fromkeys(kind for counts in counted for kind in counts))
    if not kinds:
        return Section("packed", "Packed weights", (Line("No node computes with packed weights.", tone="bad"),))
    rows = [
        (operator, "packed" if operator in PACKED else "floating point", short_provider(provider))
        + tuple(str(counts[operator, provider]) for counts in counted)
        for operator, provider in sorted(kinds, key=lambda kind: (kind[0] not in PACKED, kind))
    ]
    heads = (words("operator"), words("weights"), words("on"), *(Column(f"{phase.name} nodes") for phase in phases))
    blocks: list[Block] = [Line(_summary(report.package.precision, counted[-1], phases[-1]))]
    blocks.append(table("Products and look-ups", heads, rows))
    return Section("packed", "Packed weights", tuple(blocks))


def _counted(phase: Phase) -> Counter[tuple[str, str]]:
    """Nodes by operator and provider, of those that read weights."""
    known = ((node.op_type, provider_of(node)) for node in phase.nodes if node.op_type is not None)
    return Counter((operator, provider) for operator, provider in known if operator in PACKED | FLOATING)


def _summary(precision: str, counts: Counter[tuple[str, str]], phase: Phase) -> str:
    """One sentence."""
    packed = sum(count for (operator, _), count in counts.items() if operator in PACKED)
    rest = sum(counts.values()) - packed
    left = f"; {plural(rest, 'product')} in floating point" if rest else ""
    return f"{plural(packed, 'node')} of {phase.name} read weights of an {precision} package as they are packed{left}."
