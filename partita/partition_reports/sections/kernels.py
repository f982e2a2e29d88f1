"""Kernel paths of the nodes, slow ones first with cause, cost and remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from partita.diagnosis.records import KernelPath
from partita.observations.text_format import in_phases, listing, name_some, percent, plural, short_provider, tally
from partita.partition_reports.groups import grouped
from partita.partition_reports.records import Report
from partita.partition_reports.sections.model import Block, Column, Group, Line, Section, table
from partita.partition_reports.sections.shared import first_of

NAMED = 8
"""Maximum families of nodes that are named."""
PathGroup = tuple[str, str, str]
"""Path, cause and provider."""


def section(report: Report) -> Section | None:
    """None if no executed node has an operator with several kernels."""
    if not report.kernel_paths:
        return None
    slow = slow_groups(report)
    blocks: list[Block] = [_group(*entry) for entry in slow]
    if not slow:
        blocks.append(Line("No node is known to take a slow path."))
    for (operator, unknown), entries in grouped(
        report.kernel_paths, lambda entry: (entry.op_type, entry.unknown)
    ).items():
        if unknown:
            count = plural(len({entry.node for entry in entries}), f"{operator} node")
            blocks.append(Line(f"{count}: {unknown}", "unknown"))
    blocks.append(_every_path(report))
    nodes = {entry.node for _, entries in slow for entry in entries}
    return Section("kernels", "Kernel paths", tuple(blocks), f"{plural(len(nodes), 'node')} slow" if nodes else "")


def slow_groups(report: Report) -> list[tuple[PathGroup, list[KernelPath]]]:
    """Nodes on slow paths by path, cause and provider; the longest time of the last phase first."""
    slow = (entry for entry in report.kernel_paths if entry.is_slow)
    groups = grouped(slow, lambda entry: (entry.path, entry.cause, entry.provider))
    return sorted(groups.items(), key=lambda item: (-_share(_last_phase(item[1])), -len(item[1]), item[0]))


def slow_text(report: Report) -> str:
    """`6 Attention nodes: whole cache (43.2 % of the node time in decode)`; empty without slow paths."""
    groups = slow_groups(report)
    if not groups:
        return ""
    (path, _, _), entries = groups[0]
    last = _last_phase(entries)
    operators = listing(dict.fromkeys(entry.op_type or "unknown" for entry in last))
    others = f"; and {plural(len(groups) - 1, 'more path')}" if len(groups) > 1 else ""
    return f"{len(last)} {operators} {'node' if len(last) == 1 else 'nodes'}: {path}{_cost(last, ' ({})')}{others}"


def _group(group: PathGroup, entries: Sequence[KernelPath]) -> Group:
    """One slow path with its nodes."""
    (path, cause, provider), last, first = group, _last_phase(entries), entries[0]
    blocks: list[Block] = [Line(cause, "cause")]
    blocks.append(Line(_cost(last, "{}") or "unknown: no phase measured these nodes", "cost"))
    blocks.append(Line(tally(dict(Counter(entry.op_type or "unknown" for entry in last))), "operators"))
    blocks.append(Line(name_some(dict.fromkeys(entry.node for entry in entries), NAMED), "nodes"))
    blocks.append(Line(first_of(entry.evidence for entry in entries), f"evidence ({first.evidence_kind})"))
    blocks.append(Line(first.remedy, "remedy", "good"))
    count = len({entry.node for entry in entries})
    phases = in_phases(dict.fromkeys(entry.phase for entry in entries))
    return Group(f"{path}: {plural(count, 'node')}{phases}, on {short_provider(provider)}", tuple(blocks))


def _last_phase(entries: Sequence[KernelPath]) -> list[KernelPath]:
    """The entries of the last phase."""
    return [entry for entry in entries if entry.phase == entries[-1].phase]


def _share(entries: Iterable[KernelPath]) -> float:
    """Share of the node time of their phase; 0 if no time is known."""
    return sum(entry.time_share or 0.0 for entry in entries)


def _cost(entries: Sequence[KernelPath], form: str) -> str:
    """Their share of the node time, in `form`; empty if unknown."""
    if all(entry.time_share is None for entry in entries):
        return ""
    return form.format(f"{percent(_share(entries))} of the node time{in_phases([entries[0].phase])}")


def _every_path(report: Report) -> Block:
    """Number of nodes of each operator and path, by phase."""
    phases = list(dict.fromkeys(entry.phase for entry in report.kernel_paths))
    counts = Counter((*_kind(entry), entry.phase) for entry in report.kernel_paths)
    kinds = sorted({_kind(entry) for entry in report.kernel_paths}, key=lambda kind: (kind[3] != "yes", kind))
    rows = [
        (operator, path, short_provider(provider), slow, evidence)
        + tuple(str(counts[operator, path, provider, slow, evidence, phase]) for phase in phases)
        for operator, path, provider, slow, evidence in kinds
    ]
    heads = ("operator", "path", "provider", "slow", "evidence")
    return table("Kernel paths", [*heads, *(Column(f"{phase} nodes") for phase in phases)], rows, obvious=True)


def _kind(entry: KernelPath) -> tuple[str, str, str, str, str]:
    """Operator, path, provider, whether slow, kind of evidence."""
    slow = "yes" if entry.is_slow else "unknown" if entry.evidence_kind == "none" else "no"
    return entry.op_type or "unknown", entry.path, entry.provider, slow, entry.evidence_kind
