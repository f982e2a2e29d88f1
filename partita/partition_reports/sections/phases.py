"""Figures of each phase, copies between devices, work, speculative decoding and the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from partita.observations.text_format import (
    NOT_KNOWN,
    families,
    human_bytes,
    in_phases,
    name_some,
    per_run,
    percent,
    plural,
    short_provider,
)
from partita.partition_reports.cost import total_bytes, waiting_us
from partita.partition_reports.groups import added_nodes, file_counts, folded_nodes, grouped
from partita.partition_reports.outcome import (
    TOO_FEW,
    cache_text,
    is_timed,
    merge_phases,
    status_of,
    too_few_steps,
    used_phases,
)
from partita.partition_reports.placement import subgraph_copies
from partita.partition_reports.records import Copy, Phase, PhaseCost, Report
from partita.partition_reports.sections.model import (
    MOST,
    Block,
    Column,
    Line,
    Section,
    Table,
    fields_of,
    label_of,
    pairs,
    table,
    table_of,
    value_text,
)

FIGURES = (
    *("partitions", "copies", "copy_bytes_per_run", "copy_bytes_per_token"),
    *("host_wait_us_per_run", "host_wait_us_per_token", "observed_runs", "steps", "tokens", "seconds"),
    *("tokens_per_second", "step_p50_ms", "step_p95_ms", "step_p99_ms", "overhead_p50_ms"),
)
"""Fields of `PhaseCost` and `Phase` that are figures."""
TAILS = {"step_p95_ms": 20, "step_p99_ms": 100}
"""Percentile -> minimum number of steps; with fewer steps it equals the slowest step."""
WORK_NOTE = (
    "One step. read: weights, and cached keys and values. flops: products and attention. ceiling share: the time of "
    "this work at the measured rates of the machine, as a share of its host time."
)
NAMED_STATES = 12
TIMED = (
    "The time of a copy includes the wait for the device. -: unknown; "
    "ONNX Runtime does not profile copies of session inputs and outputs."
)
UNTIMED = "-: unknown, because the size depends on values."


def section(report: Report) -> Section:
    """The figures of all phases, and the steps that they cover."""
    blocks: list[Block] = [_figures(report.phases)] if report.phases else [Line("No phase was run.")]
    blocks += [Line(phase.bound.sentence, "bound") for phase in report.phases if phase.bound is not None]
    for phase in report.phases:
        few = f"; {plural(phase.steps, 'step')}: {TOO_FEW}" if too_few_steps(phase) else ""
        blocks.append(Line(f"{phase.name}: {phase.timing_note}{few}.", tone="quiet"))
    if report.totals is not None:
        blocks.append(pairs("The whole run", fields_of(report.totals)))
    return Section("phases", "Phases", tuple(blocks))


def _figures(phases: Sequence[Phase]) -> Table:
    """One column per phase."""
    rows = [*_node_figures(phases)]
    rows += [(label_of(name), *(_figure_text(phase, name) for phase in phases)) for name in FIGURES]
    shown = (row for row in rows if any(cell != NOT_KNOWN for cell in row[1:]))
    return table("The phases in figures", ["figure", *(Column(phase.name) for phase in phases)], shown, obvious=True)


def _node_figures(phases: Sequence[Phase]) -> Iterator[tuple[str, ...]]:
    """Nodes per provider, with their share of the node time, and nodes that ONNX Runtime added or folded."""
    counts = [file_counts(phase) for phase in phases]
    for provider in dict.fromkeys(entry.provider for phase in phases for entry in phase.providers):
        shares = [{entry.provider: entry.time_share for entry in phase.providers}.get(provider) for phase in phases]
        cells = (
            f"{each[provider]:,}" + ("" if share is None else f" ({percent(share)})")
            for each, share in zip(counts, shares, strict=True)
        )
        yield f"nodes on {short_provider(provider)}{' (node time)' if any(shares) else ''}", *cells
    for name, count in (("added", added_nodes), ("folded", folded_nodes)):
        if any(map(count, phases)):
            yield f"nodes {name} by ONNX Runtime", *(f"{count(phase):,}" for phase in phases)


def _figure_text(phase: Phase, name: str) -> str:
    """A figure of a phase; bytes of copies may be a lower bound."""
    if name == "copy_bytes_per_run" and phase.cost is not None:
        return copied_bytes(phase.copies)
    if name in PhaseCost.model_fields:
        return value_text(name, getattr(phase.cost, name, None))
    return value_text(name, getattr(phase, name) or None) if phase.steps >= TAILS.get(name, 0) else NOT_KNOWN


def work_section(report: Report) -> Section | None:
    """Bytes and arithmetic per operator and layer, and their share of the measured ceilings; None if unknown."""
    names, blocks = ("name", "read_bytes", "flops", "ceiling_share"), list[Block]()
    for phase in report.phases:
        for title, groups in (("operator", phase.by_op_type), ("layer", phase.by_layer)):
            shown = [entry for entry in groups if entry.read_bytes]
            if shown:
                caption = f"Work by {title}{in_phases([phase.name])}"
                blocks.append(table_of(caption, shown, *names, most=MOST, obvious=False))
    return Section("work", "Work", (*blocks, Line(WORK_NOTE, tone="quiet"))) if blocks else None


def cache_section(report: Report) -> Section | None:
    """None without a cache."""
    cache, status = report.cache, status_of(report.cache)
    if cache is None or status == "no_cache":
        return None
    steps = f", {plural(cache.checked_steps, 'observed step')}" if cache.checked_steps else ""
    blocks: list[Block] = [Line(f"{plural(cache.states, 'state')}: {cache_text(cache)}{steps}")]
    moved = [entry.name for entry in cache.entries if not entry.in_place and status != "not_checked"]
    blocks += [Line(name_some(moved, NAMED_STATES), "NOT in place", "bad")] if moved else []
    return Section("cache", "KV cache", tuple(blocks))


def speculation_section(report: Report) -> Section | None:
    """None without speculative decoding."""
    if report.speculation is None:
        return None
    figures = pairs("Speculative decoding", fields_of(report.speculation))
    return Section("speculation", "Speculative decoding", (figures,))


# Copies


def copies_section(report: Report) -> Section | None:
    """Copies between devices, by family; None if no nodes are known."""
    used = used_phases(report)
    copying = tuple(phase for phase in used if phase.copies)
    if not used:
        return None
    if not copying:
        inside = "".join(dict.fromkeys(map(_subgraph_suffix, used)))
        known = any(entry.source == "memory_info" and entry.available for entry in report.sources)
        bound = "every session input and output is bound in the memory that ONNX Runtime expects"
        bound = bound if known else "copies of session inputs and outputs are unknown"
        none = f"None: no Memcpy node{f' outside control flow{inside}' if inside else ''}, and {bound}."
        return Section("copies", "Copies", (Line(none),))
    tables = map(_copy_table, merge_phases(copying))
    return Section("copies", "Copies", (*tables, Line(TIMED if is_timed(report) else UNTIMED, tone="quiet")))


def _copy_table(phases: Sequence[Phase]) -> Table:
    """One row for copies whose direction, tensor and cause differ only in numbers, such as the layer."""
    phase = max(reversed(phases), key=lambda phase: phase.observed_runs > 0)  # observed runs have sizes
    tensors, causes = (_family_names(map(text, phase.copies)) for text in (_tensor_of, _cause_text))
    alike = grouped(
        phase.copies, lambda copy: (tensors[_tensor_of(copy)], _direction_text(copy), causes[_cause_text(copy)])
    )
    rows = [
        {
            "tensor": tensor,
            "direction": direction,
            "copies": len(copies),
            "bytes": copied_bytes(copies) if total_bytes(copies) is None else total_bytes(copies),
            "wait_us": waiting_us(copies) if all(copy.kind == "memcpy_node" for copy in copies) else None,
            "caused_by": cause,
        }
        for (tensor, direction, cause), copies in alike.items()
    ]
    caption = f"{plural(len(phase.copies), 'copy')} between devices{in_phases(phase.name for phase in phases)}"
    return table_of(f"{caption}; figures {per_run(phase.name)}", rows, most=MOST, obvious=False)


def _family_names(names: Iterable[str]) -> dict[str, str]:
    """Name -> name of its family, whose members differ only in numbers."""
    return {member: name for name, members in families(names).items() for member in members}


def _tensor_of(copy: Copy) -> str:
    return copy.name if copy.kind != "memcpy_node" else copy.tensor or NOT_KNOWN


def _direction_text(copy: Copy) -> str:
    """Direction of the copy, and whether it is a session input or output."""
    text = "unknown" if copy.direction == "unknown" else f"to {copy.direction.rpartition('_to_')[2]}"
    return text if copy.kind == "memcpy_node" else f"{copy.kind.replace('_', ' ')}, {text}"


def _cause_text(copy: Copy) -> str:
    """The nodes that require a copy, or why they are unknown."""
    if not copy.caused_by:
        return f"unknown: {copy.cause_missing_reason}" if copy.cause_missing_reason else "session input or output"
    first, *others = copy.caused_by
    return f"{first} and {plural(len(others), 'more node')}" if others else first


def copies_text(phase: Phase) -> str:
    """Copies of one run with their bytes, and partitions."""
    counted = f"{len(phase.copies):,} ({copied_bytes(phase.copies)})" if phase.copies else "0"
    parts = plural(len(phase.partitions), "partition")
    return f"{counted} {per_run(phase.name)}{_subgraph_suffix(phase)}; {parts}"


def _subgraph_suffix(phase: Phase) -> str:
    """Suffix with the number of copies in control-flow subgraphs."""
    if phase.subgraphs is None:
        return ""
    if subgraph_copies(phase) is None:
        return " (some in control-flow subgraphs may be missing)"
    return f" and {phase.subgraphs.copies:,} in control-flow subgraphs" if phase.subgraphs.copies else ""


def copied_bytes(copies: Sequence[Copy]) -> str:
    """Sum of the sizes of copies, marked if some are unknown."""
    known = sum(copy.bytes_per_run or 0 for copy in copies)
    if total_bytes(copies) is not None:
        return human_bytes(known)
    return f"{human_bytes(known)} or more" if known else "size unknown"
