"""Summary of a report as a record."""

from __future__ import annotations

from collections import Counter

from partita.partition_reports.cache_state import is_in_place
from partita.partition_reports.file_nodes import added_nodes, file_counts, folded_nodes
from partita.partition_reports.groups import share_of
from partita.partition_reports.outcome import fallbacks_of, preferred_of, state_name
from partita.partition_reports.records import Phase, PhaseSummary, Report, Summary
from partita.partition_reports.verdict import verdict_of


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
    return PhaseSummary(
        phase=phase.name,
        nodes=counts.total(),
        nodes_by_provider=dict(counts.most_common()),
        share=share_of(counts[preferred], counts.total()),
        fallback_nodes=counts.total() - counts[preferred],
        added_nodes=added_nodes(phase),
        folded_nodes=folded_nodes(phase),
        reasons=dict(Counter(entry.reason for entry in fallbacks_of(report) if entry.phase == phase.name)),
        copies=len(phase.copies),
        copy_bytes_per_run=phase.cost.copy_bytes_per_run if phase.cost is not None else None,
        tokens_per_second=phase.tokens_per_second,
        step_p50_ms=phase.step_p50_ms,
    )
