"""What can be done about what a report shows, most telling first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.diagnosis.actions import Action, Situation, steps_for, steps_for_provider
from partita.diagnosis.records import Fallback
from partita.partition_reports.records import Report


def situation_of(report: Report) -> Situation:
    """What a report is about, for the blanks of a step."""
    # Options of providers have the provider's name before a dot; those of generation have none.
    options = {name: value for name, value in report.request.options.items() if "." in name}
    device = report.dry_run.device if report.dry_run is not None else ""
    return Situation(report.package, report.request.path, report.request.chain, options, device)


def for_reason(report: Report, code: str, entries: Sequence[Fallback]) -> list[Action]:
    """The steps of a reason that make sense for this report."""
    return steps_for(
        situation_of(report),
        code,
        entries[0].wanted,
        unprobed=any(entry.unprobed for entry in entries),
        trials=[entry.trials for entry in entries],
    )


def top_actions(report: Report, groups: Sequence[tuple[tuple[str, str], Sequence[Fallback]]]) -> Iterator[Action]:
    """The steps for providers that are not there, and for the first reason that has any."""
    for entry in report.chain:
        if entry.status == "unavailable":
            yield from steps_for_provider(situation_of(report), entry.reason, entry.provider)
    for (reason, _), entries in groups:
        found = for_reason(report, reason, entries)
        if found:
            yield from found
            return
