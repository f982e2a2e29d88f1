"""One-line verdict of a report (placement, copies, cache, problems), and its summary as a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from partita.observations.names import CPU, UNKNOWN
from partita.observations.text_format import human_bytes, in_phases, listing, plural
from partita.partition_reports.file_nodes import added_nodes, file_counts, folded_nodes
from partita.partition_reports.groups import share_of
from partita.partition_reports.outcome import (
    counted_rows,
    failure_of,
    fallbacks_of,
    is_in_place,
    key_of,
    preferred_of,
    state_name,
    status_of,
    was_interrupted,
)
from partita.partition_reports.records import Cache, Phase, PhaseSummary, Report, Summary


def verdict_of(report: Report) -> str:
    """The verdict, the most important part first. Names are not sanitised."""
    parts = [_describe_placement(same) for same in merge_phases(report.phases)] or ["no phase was run"]
    if report.dry_run is not None:
        parts.insert(0, f"DRY RUN as {report.dry_run.device_name}")
    if report.cache is not None:
        parts.append(describe_cache(report.cache))
    missing = [entry for entry in report.chain if entry.status == "unavailable"]
    parts += [f"{entry.provider} unavailable ({entry.reason or 'no reason known'})" for entry in missing]
    if report.conflicts:
        parts.append(f"conflicting sources for {plural(len({entry.node for entry in report.conflicts}), 'node')}")
    failed = sum(not check.passed for check in report.checks)
    if failed:
        parts.append(f"{plural(failed, 'check')} FAILED")
    if report.exceeded_limits:
        parts.append(f"{plural(len(report.exceeded_limits), 'limit')} EXCEEDED")
    if failure_of(report) is not None:
        parts.insert(0, "the run FAILED")
    if was_interrupted(report):
        parts.append("run ended early: interrupted")
    return "; ".join(part for part in parts if part)


def merge_phases(phases: tuple[Phase, ...]) -> list[list[Phase]]:
    """Phases grouped by equal nodes, providers and copies."""
    merged: dict[object, list[Phase]] = {}
    for phase in phases:
        placed = tuple((node.name, node.provider) for node in phase.nodes)
        merged.setdefault((placed, tuple((copy.kind, copy.name) for copy in phase.copies)), []).append(phase)
    return list(merged.values())


def phase_names(phases: list[Phase]) -> str:
    """`prefill and decode`."""
    return listing(phase.name for phase in phases)


def _describe_placement(phases: list[Phase]) -> str:
    """Nodes per provider, partitions and copies of phases with equal placement."""
    phase = phases[0]
    total = len(phase.nodes)
    if phase.folded_nodes is not None:
        return (
            f"nothing executes in {phase_names(phases)}: ONNX Runtime folded all "
            f"{plural(phase.folded_nodes, 'node')} at load time"
        )
    if not total or not phase.providers:
        return f"no nodes are known in {phase_names(phases)}"
    memcpy = sum(copy.kind == "memcpy_node" for copy in phase.copies)
    border = len(phase.copies) - memcpy
    moved = f", {plural(border, 'copy')} of session inputs or outputs" if border else ""
    parts = f"{plural(len(phase.partitions), 'partition')}, {plural(memcpy, 'Memcpy node')}{moved}"
    inside = len(phase.subgraphs.on_cpu) if phase.subgraphs else 0
    subgraphs = f"; {plural(inside, 'node')} in control-flow subgraphs on {CPU}" if inside else ""
    return f"{placement_text(phases)}; {parts}{subgraphs}"


def placement_text(phases: Sequence[Phase], first: str | None = None, name: Callable[[str], str] = str) -> str:
    """File nodes per provider, and added nodes, of phases with equal placement.

    `first`: the provider to begin with, even without nodes; None: the provider with the most nodes. `name`: formats a
    provider name.
    """
    counts = file_counts(phases[0])
    ranked = [*counts.most_common(1), *((entry.provider, 0) for entry in phases[0].providers)]
    head = ranked[0][0] if first is None else first
    others = [f"{count:,} on {_named(each, name)}" for each, count in counts.most_common() if each != head]
    placed = ", ".join([f"{counts[head]:,} of {plural(counts.total(), 'node')} on {_named(head, name)}", *others])
    added = added_nodes(phases[0])
    more = f" (and {added:,} added by ONNX Runtime)" if added else ""
    return f"{placed}{more}{in_phases(phase.name for phase in phases)}"


def _named(provider: str, name: Callable[[str], str]) -> str:
    """The formatted provider, or `an unknown provider`."""
    return "an unknown provider" if provider == UNKNOWN else name(provider)


def describe_cache(cache: Cache) -> str:
    """Whether the cache stayed in place, and its memory."""
    return "no cache" if status_of(cache) == "no_cache" else f"cache {cache_text(cache)}"


def cache_text(cache: Cache) -> str:
    """As `describe_cache` for a cache with states, without the word cache."""
    where = f"{human_bytes(cache.size_bytes)} on {listing(sorted(cache.memories))}"
    status = status_of(cache)
    if status == "not_checked":
        return f"not checked: no step was observed ({where})"
    if status == "copied":
        copied = cache.states - cache.in_place_states
        size = f", {human_bytes(cache.copied_bytes)} in the last step" if cache.copied_bytes else ""
        return f"NOT in place: {copied} of {plural(cache.states, 'state')} copied{size} ({where})"
    if status == "moved":
        return f"NOT in place: its address changed {plural(cache.address_changes, 'time')} ({where})"
    return f"in place ({where})"


def summarise(report: Report) -> Summary:
    """The summary of a report."""
    return Summary(
        preferred_provider=preferred_of(report) if report.chain else None,
        state=state_name(report),
        verdict=verdict_of(report),
        phases=tuple(_summarise_phase(report, phase) for phase in report.phases),
        cache_in_place=is_in_place(report.cache),
        checks_failed=sum(not check.passed for check in report.checks),
        limits_exceeded=len(report.exceeded_limits),
        conflicts=len({entry.node for entry in report.conflicts}),
    )


def _summarise_phase(report: Report, phase: Phase) -> PhaseSummary:
    counts, preferred = file_counts(phase), preferred_of(report)
    rows, reasons = counted_rows(report), Counter[str]()
    for entry in fallbacks_of(report):
        if entry.phase == phase.name:
            reasons[entry.reason] += len(rows[key_of(entry)])
    return PhaseSummary(
        phase=phase.name,
        nodes=counts.total(),
        nodes_by_provider=dict(counts.most_common()),
        share=share_of(counts[preferred], counts.total()),
        fallback_nodes=counts.total() - counts[preferred],
        added_nodes=added_nodes(phase),
        folded_nodes=folded_nodes(phase),
        reasons=dict(reasons),
        copies=len(phase.copies),
        copy_bytes_per_run=phase.cost.copy_bytes_per_run if phase.cost is not None else None,
        tokens_per_second=phase.tokens_per_second,
        step_p50_ms=phase.step_p50_ms,
    )
