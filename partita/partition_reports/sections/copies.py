"""Copies between devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partita.observations.text_format import (
    NOT_KNOWN,
    decimals,
    families,
    in_phases,
    per_run,
    plural,
)
from partita.partition_reports.cost import waiting_us
from partita.partition_reports.groups import grouped
from partita.partition_reports.outcome import is_timed, merge_phases
from partita.partition_reports.records import Copy, Phase, Report
from partita.partition_reports.sections.model import Block, Head, Line, Section, Table, numbers, table
from partita.partition_reports.sections.shared import copied_bytes, placements, subgraph_suffix


def _family_names(names: Iterable[str]) -> dict[str, str]:
    """Name -> name of its family, whose members differ only in numbers."""
    return {member: name for name, members in families(names).items() for member in members}


TIMED = (
    "The time of a copy includes the wait for the device. -: unknown; "
    "ONNX Runtime does not profile copies of session inputs and outputs."
)
UNTIMED = "-: unknown, because the size depends on values."


def section(report: Report) -> Section | None:
    """Copies between devices, by family; None if no nodes are known."""
    placed = placements(report)
    if not placed:
        return None
    copying = tuple(phase for phases in placed for phase in phases if phase.copies)
    if not copying:
        inside = "".join(dict.fromkeys(subgraph_suffix(phase) for phases in placed for phase in phases))
        return Section("copies", "Copies", (Line(_render_none(report, inside)),))
    blocks: list[Block] = []
    for phases in merge_phases(copying):
        blocks.append(_family_table(report, phases))
    blocks.append(Line(TIMED if is_timed(report) else UNTIMED, tone="quiet"))
    return Section("copies", "Copies", tuple(blocks))


def _render_none(report: Report, inside: str) -> str:
    """Text for no copies, as far as known. `inside`: text about copies in control flow."""
    known = any(entry.source == "memory_info" and entry.available for entry in report.sources)
    bound = "every session input and output is bound in the memory that ONNX Runtime expects"
    where = f" outside control flow{inside}" if inside else ""
    return f"None: no Memcpy node{where}, and {bound if known else 'copies of session inputs and outputs are unknown'}."


def _where(phases: Sequence[Phase]) -> str:
    """` in prefill and decode`."""
    return in_phases(phase.name for phase in phases)


def _family_table(report: Report, phases: Sequence[Phase]) -> Table:
    """One row for copies whose direction, tensor and cause differ only in numbers, such as the layer."""
    timed = is_timed(report)
    phase = max(reversed(phases), key=lambda phase: phase.observed_runs > 0)  # observed runs have sizes
    families_of_copies = _find_families(phase.copies)

    def rest(shown: int) -> str:
        others = [copy for copies in list(families_of_copies.values())[shown:] for copy in copies]
        return f"and {plural(len(others), 'more copy')}: {copied_bytes(others)} {per_run(phase.name)}"

    rows = []
    for (tensor, cause, direction), copies in families_of_copies.items():
        wait = waiting_us(copies) if all(copy.kind == "memcpy_node" for copy in copies) else None
        time = [decimals(wait, 1e-3)] if timed else []
        rows.append((tensor, direction, f"{len(copies):,}", copied_bytes(copies), *time, cause))
    figures = numbers("copies", "bytes", *(["wait, ms"] if timed else []))
    heads: tuple[Head, ...] = ("tensor", "direction", *figures, "caused by")
    caption = (
        f"{plural(len(phase.copies), 'copy')} between devices{_where(phases)}; bytes{' and wait' if timed else ''}"
    )
    caption += f" {per_run(phase.name)}"
    return table(caption, heads, rows, rest=rest)


def _find_families(copies: Sequence[Copy]) -> dict[tuple[str, str, str], list[Copy]]:
    """Copies by tensor, cause and direction; names that differ only in numbers are merged."""
    family_of, cause_of = _family_names(map(_tensor_of, copies)), _family_names(map(_render_cause, copies))
    return grouped(
        copies, lambda copy: (family_of[_tensor_of(copy)], cause_of[_render_cause(copy)], _direction_text(copy))
    )


def _tensor_of(copy: Copy) -> str:
    return copy.name if copy.kind != "memcpy_node" else copy.tensor or NOT_KNOWN


def _direction_text(copy: Copy) -> str:
    """Direction of the copy, and whether it is a session input or output."""
    text = "unknown" if copy.direction == "unknown" else f"to {copy.direction.rpartition('_to_')[2]}"
    return text if copy.kind == "memcpy_node" else f"{copy.kind.replace('_', ' ')}, {text}"


def _render_cause(copy: Copy) -> str:
    """The nodes that require a copy, or why they are unknown."""
    if not copy.caused_by:
        return f"unknown: {copy.cause_missing_reason}" if copy.cause_missing_reason else "session input or output"
    first, *others = copy.caused_by
    return f"{first} and {plural(len(others), 'more node')}" if others else first
