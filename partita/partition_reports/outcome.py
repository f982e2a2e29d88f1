"""What came of a run: all on the wanted provider, nearly, partly, not at all, or refused. No words."""

from __future__ import annotations

from typing import Literal

from partita.partition_reports.groups import provider_of
from partita.partition_reports.records import NodePlacement, Phase, Report

StateName = Literal["all", "nearly", "partly", "none", "refused", "nothing"]


def state_name(report: Report) -> StateName:
    """All, all but what is harmless, partly, not at all, or refused."""
    phases = used_phases(report)
    away = [node for phase in phases for node in strays(report, phase)]
    if not phases:
        return "nothing"
    if any(part.provider == wanted_of(report) for part in report.rejected):
        return "refused"
    if not away and not report.fallbacks:
        return "all"
    if len(away) == sum(len(phase.nodes) for phase in phases):
        return "none"
    return "nearly" if is_mild(report) else "partly"


def is_mild(report: Report) -> bool:
    """Whether every fallback is harmless; without times, as in a dry run, none may make a copy necessary."""
    if any(copy.cause_unknown for phase in report.phases for copy in phase.copies):
        return False
    if is_timed(report):
        return all(entry.cost is not None and entry.cost.harmless is True for entry in report.fallbacks)
    return all(entry.cost is not None and not entry.cost.copies for entry in report.fallbacks)


def wanted_of(report: Report) -> str:
    """The first provider of the chain, by ONNX Runtime's name."""
    return report.chain[0].provider if report.chain else "no provider"


def used_phases(report: Report) -> tuple[Phase, ...]:
    """Phases of which nodes are known."""
    return tuple(phase for phase in report.phases if phase.nodes)


def main_phase(report: Report) -> Phase | None:
    """The phase that is run for every token, or the only one."""
    phases = used_phases(report)
    return next((phase for phase in phases if phase.name == "decode"), phases[-1] if phases else None)


def strays(report: Report, phase: Phase) -> list[NodePlacement]:
    """Nodes of a phase that are not on the wanted provider."""
    return [node for node in phase.nodes if provider_of(node) != wanted_of(report)]


def is_timed(report: Report) -> bool:
    """Whether there are times: a dry run has none."""
    return report.dry_run is None
