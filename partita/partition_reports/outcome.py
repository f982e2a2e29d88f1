"""What came of a run: all on the preferred provider, nearly, partly, not at all, or refused. No words."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from partita.diagnosis.records import Fallback
from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.groups import provider_of
from partita.partition_reports.node_keys import inlined_parts, is_added, parts_of
from partita.partition_reports.records import NodePlacement, Phase, Report

FEW_STEPS = 10
"""With fewer steps a speed is too uncertain to compare."""
TOO_FEW = "too few to tell a speed"
StateName = Literal["all", "nearly", "partly", "none", "refused", "empty", "nothing", "failed"]


def state_name(report: Report) -> StateName:
    """All, all but what is harmless, partly, not at all, or refused; empty where no node is left to run, nothing where
    none is known, failed where a run failed.
    """
    if failure_of(report) is not None:
        return "failed"
    phases = used_phases(report)
    away = [node for phase in phases for node in strays(report, phase)]
    if not phases:
        return "empty" if is_folded(report) else "nothing"
    if any(part.provider == wanted_of(report) for part in report.rejected):
        return "refused"
    if not away and not report.fallbacks:
        return "all"
    if len(away) == sum(len(phase.nodes) for phase in phases):
        return "none"
    return "nearly" if _is_mild(report) else "partly"


def _is_mild(report: Report) -> bool:
    """Whether every fallback is harmless; without times, as in a dry run, none may make a copy necessary."""
    if any(copy.cause_unknown for phase in report.phases for copy in phase.copies):
        return False
    if any(phase.bodies is not None and phase.bodies.unseen for phase in report.phases):
        return False
    if is_timed(report):
        return all(entry.cost is not None and entry.cost.harmless is True for entry in report.fallbacks)
    return all(entry.cost is not None and not entry.cost.copies for entry in report.fallbacks)


def failure_of(report: Report) -> str | None:
    """Why a run failed, on one line; None when none did. A run that was interrupted did not fail."""
    totals, why = report.totals, report.failed
    if why is None and totals is not None and totals.finish_reason == "error":
        why = totals.finish_detail or "the generation ended with an error"
    return None if why is None else " ".join(why.split())


def was_interrupted(report: Report) -> bool:
    """Whether Ctrl-C ended the run."""
    return "runs" in report.interrupted or (report.totals is not None and report.totals.finish_reason == "interrupted")


def is_default_without_first(report: Report) -> bool:
    """Whether the default chain would begin with a provider that is installed and could not start."""
    return bool(report.chain) and report.chain[0].status != "active" and wanted_of(report) not in report.request.chain


def has_run(report: Report) -> bool:
    """Whether a run ended: a dry run has no times, and a model may only have been opened."""
    return is_timed(report) and any(phase.steps or phase.observed_runs for phase in report.phases)


def wanted_of(report: Report) -> str:
    """The first provider of the chain, by ONNX Runtime's name."""
    return report.chain[0].provider if report.chain else "no provider"


def active_of(report: Report) -> tuple[str, ...]:
    """Providers of the chain that were there, by ONNX Runtime's names."""
    return tuple(entry.provider for entry in report.chain if entry.status == "active")


def fallbacks_of(report: Report) -> tuple[Fallback, ...]:
    """The fallbacks as they are told: by the providers that were there. That one was not is said once, and is no reason
    of a node that another preferred provider could have taken.
    """
    active = active_of(report)
    return tuple(entry.among(active) for entry in report.fallbacks)


def used_phases(report: Report) -> tuple[Phase, ...]:
    """Phases of which nodes are known."""
    return tuple(phase for phase in report.phases if phase.nodes)


def is_folded(report: Report) -> bool:
    """Whether ONNX Runtime folded every phase: the outputs are constants, or inputs handed through."""
    return bool(report.phases) and all(phase.folded is not None for phase in report.phases)


def is_known(phase: Phase) -> bool:
    """Whether it is known what runs in the phase, be it nothing."""
    return bool(phase.nodes) or phase.folded is not None


def main_phase(report: Report) -> Phase | None:
    """The phase that is run for every token, or the only one; None where nothing is known of any."""
    phases = used_phases(report) or tuple(filter(is_known, report.phases))
    return next((phase for phase in phases if phase.name == "decode"), phases[-1] if phases else None)


def file_counts(phase: Phase) -> Counter[str]:
    """Nodes of the ONNX file behind those of a phase, per provider: what every share is of. A compiled or fused node
    counts as all that it was made of, and one that ONNX Runtime added, as Memcpy, not at all. Where no node is known to
    be of the file: those that are no Memcpy node.
    """
    counts: Counter[str] = Counter()
    for node in (*phase.nodes, *inlined_parts(phase)):
        if not is_added(node):
            counts[provider_of(node)] += len(parts_of(node))
    return counts or Counter(provider_of(node) for node in phase.nodes if not is_memcpy(node))


def added_nodes(phase: Phase) -> int:
    """How many nodes of a phase `file_counts` does not count, because ONNX Runtime added them."""
    every = all(map(is_added, phase.nodes))
    return sum(map(is_memcpy if every else is_added, phase.nodes))


def too_few_steps(phase: Phase) -> bool:
    """Whether the speed of a phase is of so few steps that it tells little. Prefill has one or few in every run."""
    return phase.name != "prefill" and 0 < phase.steps < FEW_STEPS


def strays(report: Report, phase: Phase) -> list[NodePlacement]:
    """Nodes of a phase that are not on the preferred provider."""
    return [node for node in phase.nodes if provider_of(node) != wanted_of(report)]


def is_timed(report: Report) -> bool:
    """Whether there are times: a dry run has none."""
    return report.dry_run is None
