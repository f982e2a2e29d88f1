"""Figures of each phase, copies between devices, work, speculative decoding and the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from partita.observations.grouping import grouped
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
from partita.partition_reports.outcome import cache_text
from partita.partition_reports.phase_records import TOO_FEW, Copy, Phase, PhaseCost
from partita.partition_reports.records import Report
from partita.partition_reports.sections.model import (
    MOST,
    Block,
    Column,
    Line,
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
NAMED_STATES = 12
TIMED = (
    "The time of a copy includes the wait for the device. -: unknown; "
    "ONNX Runtime does not profile copies of session inputs and outputs."
)
UNTIMED = "-: unknown, because the size depends on values."


def phase_blocks(report: Report) -> Iterator[Block]:
    """The figures of all phases, and the steps that they cover."""
    yield _figures(report.phases) if report.phases else Line("No phase was run.")
    yield from (Line(phase.bound.sentence, "bound") for phase in report.phases if phase.bound is not None)
    for phase in report.phases:
        few = f"; {plural(phase.steps, 'step')}: {TOO_FEW}" if phase.has_few_steps else ""
        yield Line(f"{phase.name}: {phase.timing_note}{few}.", tone="quiet")
    yield pairs("The whole run", fields_of(report.totals))


def _figures(phases: Sequence[Phase]) -> Table:
    """One column per phase."""
    rows = [*_node_figures(phases)]
    rows += [(label_of(name), *(_figure_text(phase, name) for phase in phases)) for name in FIGURES]
    shown = (row for row in rows if any(cell != NOT_KNOWN for cell in row[1:]))
    return table("The phases in figures", ["figure", *(Column(phase.name) for phase in phases)], shown, obvious=True)


def _node_figures(phases: Sequence[Phase]) -> Iterator[tuple[str, ...]]:
    """Nodes per provider, with their share of the node time, and nodes that ONNX Runtime added or folded."""
    counts = [phase.file_counts for phase in phases]
    for provider in dict.fromkeys(entry.provider for phase in phases for entry in phase.providers):
        shares = [{entry.provider: entry.time_share for entry in phase.providers}.get(provider) for phase in phases]
        cells = (
            f"{each[provider]:,}" + ("" if share is None else f" ({percent(share)})")
            for each, share in zip(counts, shares, strict=True)
        )
        yield f"nodes on {short_provider(provider)}{' (node time)' if any(shares) else ''}", *cells
    for name in ("added", "folded"):
        numbers = [getattr(phase, f"{name}_count") for phase in phases]
        if any(numbers):
            yield f"nodes {name} by ONNX Runtime", *(f"{number:,}" for number in numbers)


def _figure_text(phase: Phase, name: str) -> str:
    """A figure of a phase; bytes of copies may be a lower bound."""
    if name == "copy_bytes_per_run" and phase.cost is not None:
        return copied_bytes(phase.copies)
    if name in PhaseCost.model_fields:
        return value_text(name, getattr(phase.cost, name, None))
    return value_text(name, getattr(phase, name) or None) if phase.steps >= TAILS.get(name, 0) else NOT_KNOWN


def cache_blocks(report: Report) -> Iterator[Block]:
    """Whether the cache stayed in place; nothing without a cache."""
    cache = report.cache
    if cache is None or cache.status == "no_cache":
        return
    steps = f", {plural(cache.checked_steps, 'observed step')}" if cache.checked_steps else ""
    yield Line(f"{plural(cache.states, 'state')}: {cache_text(cache)}{steps}")
    moved = [entry.name for entry in cache.entries if not entry.in_place and cache.status != "not_checked"]
    yield Line(name_some(moved, NAMED_STATES), "NOT in place", "bad")


# Copies


def copies_blocks(report: Report) -> Iterator[Block]:
    """Copies between devices, by family; nothing if no nodes are known."""
    used = report.used_phases
    if any(phase.copies for phase in used):
        yield from (_copy_table(phases) for phases in report.placements if phases[0].copies)
        yield Line(TIMED if report.is_timed else UNTIMED, tone="quiet")
    elif used:
        inside = "".join(dict.fromkeys(map(_subgraph_suffix, used)))
        known = any(entry.source == "memory_info" and entry.available for entry in report.sources)
        bound = "every session input and output is bound in the memory that ONNX Runtime expects"
        bound = bound if known else "copies of session inputs and outputs are unknown"
        yield Line(f"None: no Memcpy node{f' outside control flow{inside}' if inside else ''}, and {bound}.")


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
    if phase.subgraph_copies is None:
        return " (some in control-flow subgraphs may be missing)"
    return f" and {phase.subgraphs.copies:,} in control-flow subgraphs" if phase.subgraphs.copies else ""


def copied_bytes(copies: Sequence[Copy]) -> str:
    """Sum of the sizes of copies, marked if some are unknown."""
    known = sum(copy.bytes_per_run or 0 for copy in copies)
    if total_bytes(copies) is not None:
        return human_bytes(known)
    return f"{human_bytes(known)} or more" if known else "size unknown"
