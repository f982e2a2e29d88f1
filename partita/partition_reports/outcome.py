"""Outcome of a run: how much of it is on the preferred provider, and whether the cache stayed in place."""

from __future__ import annotations

from typing import Literal

from partita.diagnosis.records import Fallback
from partita.partition_reports.file_nodes import file_counts, ran_by, report_rows
from partita.partition_reports.groups import provider_of
from partita.partition_reports.records import Cache, FileNode, NodePlacement, Phase, Report

FEW_STEPS = 10
"""With fewer steps a speed is too uncertain to compare."""
TOO_FEW = "too few for a reliable speed"
FallbackKey = tuple[str, str, str]
"""Phase, executed node and provider."""
StateName = Literal["all", "nearly", "partly", "none", "refused", "empty", "nothing", "failed"]


def state_name(report: Report) -> StateName:
    """Share of nodes on the preferred provider: all, nearly (all but harmless fallbacks), partly, none; or refused,
    empty (no nodes to run), nothing (no known nodes), failed (run failed).
    """
    if failure_of(report) is not None:
        return "failed"
    phases = used_phases(report)
    fallbacks = [node for phase in phases for node in fallback_nodes(report, phase)]
    if not phases:
        return "empty" if is_folded(report) else "nothing"
    if any(part.provider == preferred_of(report) for part in report.rejected_parts):
        return "refused"
    if not fallbacks and not report.fallbacks:
        return "all"
    if not any(file_counts(phase)[preferred_of(report)] for phase in phases):
        return "none"
    return "nearly" if _all_harmless(report) else "partly"


def _all_harmless(report: Report) -> bool:
    """Whether every fallback is harmless; without times, as in a dry run, whether none requires a copy."""
    if any(copy.cause_missing_reason for phase in report.phases for copy in phase.copies):
        return False
    if any(phase.subgraphs is not None and phase.subgraphs.may_have_more_copies for phase in report.phases):
        return False
    if is_timed(report):
        return all(entry.cost is not None and entry.cost.harmless is True for entry in report.fallbacks)
    return all(entry.cost is not None and not entry.cost.copies for entry in report.fallbacks)


def failure_of(report: Report) -> str | None:
    """Why a run failed, on one line; None if none did. An interrupted run did not fail."""
    totals, why = report.totals, report.failure
    if why is None and totals is not None and totals.finish_reason == "error":
        why = totals.finish_detail or "the generation ended with an error"
    return None if why is None else " ".join(why.split())


def was_interrupted(report: Report) -> bool:
    """Whether Ctrl-C ended the run."""
    return "runs" in report.interruptions or (
        report.totals is not None and report.totals.finish_reason == "interrupted"
    )


def is_default_without_first(report: Report) -> bool:
    """Whether the first provider of the default chain is installed but could not start."""
    return (
        bool(report.chain) and report.chain[0].status != "active" and preferred_of(report) not in report.request.chain
    )


def has_run(report: Report) -> bool:
    """Whether the model was run: not in a dry run, and not if it was only opened."""
    return is_timed(report) and any(phase.steps or phase.observed_runs for phase in report.phases)


def preferred_of(report: Report) -> str:
    """The first provider of the chain, by ONNX Runtime's name."""
    return report.chain[0].provider if report.chain else "no provider"


def active_of(report: Report) -> tuple[str, ...]:
    """Available providers of the chain, by ONNX Runtime's names."""
    return tuple(entry.provider for entry in report.chain if entry.status == "active")


def fallbacks_of(report: Report) -> tuple[Fallback, ...]:
    """The fallbacks relative to available providers.

    An unavailable provider is not the reason for a node that another preferred provider could run.
    """
    active = active_of(report)
    return tuple(entry.restricted_to(active) for entry in report.fallbacks)


def counted_rows(report: Report) -> dict[FallbackKey, tuple[str, ...]]:
    """Fallback -> the nodes that a table of reasons counts for it, so that the counts of all add up.

    These are the file nodes that its executed node ran; a file node that ran as several executed nodes is counted for
    the first of them on its provider. A node in a control-flow subgraph counts itself. Empty for a node that ONNX
    Runtime added.
    """
    found: dict[FallbackKey, tuple[str, ...]] = {}
    for phase in report.phases:
        executed = {(node.name, provider_of(node)) for node in phase.nodes}
        runs, done = ran_by(phase), set[str]()
        for entry in report.fallbacks:
            if entry.phase == phase.name:
                rows = [row.name for row in runs.get(entry.node, ()) if provider_of(row) == entry.provider]
                if rows or (entry.node, entry.provider) in executed:
                    found[key_of(entry)] = tuple(name for name in rows if name not in done)
                    done.update(rows)
                else:
                    found[key_of(entry)] = (entry.node,)
    return found


def key_of(entry: Fallback) -> FallbackKey:
    """The key of a fallback in `counted_rows`."""
    return entry.phase, entry.node, entry.provider


def used_phases(report: Report) -> tuple[Phase, ...]:
    """Phases with nodes."""
    return tuple(phase for phase in report.phases if phase.nodes)


def is_folded(report: Report) -> bool:
    """Whether ONNX Runtime folded every phase, so that outputs are constants or inputs."""
    return bool(report.phases) and all(phase.folded_nodes is not None for phase in report.phases)


def is_known(phase: Phase) -> bool:
    """Whether the nodes of the phase are known (there may be none)."""
    return bool(phase.nodes) or phase.folded_nodes is not None


def main_phase(report: Report) -> Phase | None:
    """Decode, or the only phase; None if no phase is known."""
    phases = used_phases(report) or tuple(filter(is_known, report.phases))
    return next((phase for phase in phases if phase.name == "decode"), phases[-1] if phases else None)


def too_few_steps(phase: Phase) -> bool:
    """Whether the speed of a phase has too few steps; prefill never counts as such."""
    return phase.name != "prefill" and 0 < phase.steps < FEW_STEPS


def fallback_nodes(report: Report, phase: Phase) -> list[FileNode | NodePlacement]:
    """File nodes, and nodes that ONNX Runtime added, that are not on the preferred provider."""
    return [node for node in report_rows(phase) if provider_of(node) != preferred_of(report)]


def is_timed(report: Report) -> bool:
    """Whether there are times; a dry run has none."""
    return report.dry_run is None


CacheStatus = Literal["no_cache", "not_checked", "copied", "moved", "in_place"]
"""no_cache: no cache or no states. not_checked: not observed. copied: past and present of a state were two buffers.
moved: one buffer whose address changed. in_place: one buffer at one address in every observed step.
"""


def status_of(cache: Cache | None) -> CacheStatus:
    """Status of a cache."""
    if cache is None or not cache.states:
        return "no_cache"
    if cache.checked_steps == 0:
        return "not_checked"
    if cache.in_place_states < cache.states:
        return "copied"
    return "moved" if cache.address_changes else "in_place"


def is_in_place(cache: Cache | None) -> bool | None:
    """Whether the cache stayed in place; None without a cache, or if not observed."""
    status = status_of(cache)
    return None if status in ("no_cache", "not_checked") else status == "in_place"
