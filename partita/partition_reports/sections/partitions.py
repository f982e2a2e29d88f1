"""Partitions in execution order, tensors between them, and their cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from partita.observations.text_format import decimals, families, human_bytes, in_phases, per_run, plural, short_provider
from partita.partition_reports.records import BoundaryTensor, Partition, Phase, PhaseCost, Report
from partita.partition_reports.sections.model import Block, Column, Fold, Head, Line, Section, Table, numbers, table
from partita.partition_reports.sections.shared import best_observed, in_bytes, placements, span


def section(report: Report) -> Section | None:
    """Partitions and the tensors at their borders; None if there are none."""
    blocks: list[Block] = []
    for phases in placements(report):
        phase = best_observed(phases)
        where = in_phases(phase.name for phase in phases)
        blocks.append(_partition_table(phase, where))
        blocks += _crossing_blocks(phase, where)
        if phase.cost is not None and (phase.cost.partitions > 1 or phase.cost.copies):
            blocks.append(Line(_render_cost(phase.cost), f"cost {per_run(phase.name)}"))
    if any(phase.partitions for phase in report.phases):
        blocks.append(
            Line("session: inputs and outputs of the model. other: tensors of other partitions.", tone="quiet")
        )
    return Section("partitions", "Partitions", tuple(blocks)) if blocks else None


def _partition_table(phase: Phase, where: str) -> Table:
    """One row per partition."""
    heads: tuple[Head, ...] = (Column("#"), "provider", *numbers("nodes", "positions"))
    parts = phase.partitions

    def rest(shown: int) -> str:
        others = parts[shown:]
        return f"and {plural(len(others), 'more partition')}: {plural(sum(part.nodes for part in others), 'node')}"

    caption = f"{plural(len(parts), 'partition')}{where}, in execution order; bytes {per_run(phase.name)}"
    rows = [_partition_row(part) for part in parts]
    return table(caption, (*heads, "tensors in", "tensors out"), rows, rest=rest)


def _partition_row(part: Partition) -> tuple[str, ...]:
    directions = ("in", "out")
    borders = [_render_border([tensor for tensor in part.boundary if tensor.direction == each]) for each in directions]
    where = span(part.first_position, part.nodes)
    return (str(part.index), short_provider(part.provider), f"{part.nodes:,}", where, *borders)


def _render_border(tensors: Sequence[BoundaryTensor]) -> str:
    """Number and bytes of tensors that cross the border, by side (session, other)."""
    if not tensors:
        return "none"
    session = sum(tensor.other_side == "session" for tensor in tensors)
    sides = [(session, "session"), (len(tensors) - session, "other")]
    return ", ".join(f"{count} {side}" for count, side in sides if count) + f", {_total_bytes(tensors)}"


def _total_bytes(tensors: Iterable[BoundaryTensor]) -> str:
    """Sum of the known sizes, marked if some are unknown."""
    sizes = [tensor.size_bytes for tensor in tensors]
    known = [size for size in sizes if size is not None]
    if not known:
        return "size unknown"
    return human_bytes(sum(known)) + (" or more" if len(known) < len(sizes) else "")


def _crossing_blocks(phase: Phase, where: str) -> Iterator[Block]:
    """Tensors passed between partitions, the largest first; names that differ only in numbers share a row."""
    crossing = [
        (tensor, part.index)
        for part in phase.partitions
        for tensor in part.boundary
        if tensor.direction == "out" and tensor.other_side != "session"
    ]
    if not crossing:
        return
    crossing.sort(key=lambda entry: -(entry[0].size_bytes or 0))
    alike = families(tensor.name for tensor, _ in crossing)
    family_of = {member: name for name, members in alike.items() for member in members}
    groups: dict[str, list[BoundaryTensor]] = {}
    for tensor, _ in crossing:
        groups.setdefault(family_of[tensor.name], []).append(tensor)

    def rest(shown: int) -> str:
        others = [tensor for tensors in list(groups.values())[shown:] for tensor in tensors]
        return f"and {plural(len(others), 'more tensor')}: {_total_bytes(others)}"

    caption = f"{plural(len(crossing), 'tensor')} between partitions{where}; bytes {per_run(phase.name)}"
    rows = [(name, f"{len(tensors):,}", _total_bytes(tensors)) for name, tensors in groups.items()]
    yield table(caption, ("tensor", *numbers("tensors", "bytes")), rows, rest=rest)
    names = {str(part.index): f"{part.index} ({short_provider(part.provider)})" for part in phase.partitions}
    each = [
        (
            tensor.name,
            names[str(origin)],
            names.get(tensor.other_side, tensor.other_side),
            human_bytes(tensor.size_bytes),
        )
        for tensor, origin in crossing
    ]
    heads = ("tensor", "from partition", "to partition", Column("bytes"))
    yield Fold(f"All tensors between partitions{where}", (table(caption, heads, each),))


def _render_cost(cost: PhaseCost) -> str:
    """Cost of the partitions in one run, and per token."""
    crossing = in_bytes(cost.crossing_bytes_per_run) if cost.crossings else ""
    parts = [f"{plural(cost.crossings, 'tensor')} between partitions{crossing}"]
    copied = in_bytes(cost.copy_bytes_per_run, cost.copy_bytes_at_least)
    parts.append(f"{plural(cost.copies, 'copy')}{copied}" if cost.copies else "no copies")
    if cost.host_wait_us_per_run:
        parts.append(f"{decimals(cost.host_wait_us_per_run, 1e-3)} ms host wait")
    line = ", ".join(parts)
    if cost.copies and cost.tokens_per_run and cost.copy_bytes_per_token is not None:
        tokens = plural(cost.tokens_per_run, "new token")
        line += f"; with {tokens} per run, {human_bytes(round(cost.copy_bytes_per_token))} copied per token"
        if cost.host_wait_us_per_token:
            line += f", {decimals(cost.host_wait_us_per_token, 1e-3)} ms wait"
    return line
