"""Suggested actions for the fallbacks of a report, the most specific first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.diagnosis.actions import Action, Situation, each, steps_for, steps_for_provider
from partita.diagnosis.records import Fallback
from partita.partition_reports.records import Report
from partita.remedies import split

OF_FOLDER = ("variant", "contract", "max-length")
OF_INPUTS = ("shape", "input")
"""Options of a request other than provider options, by command-line name; those of `OF_INPUTS` are repeatable."""


def situation_of(report: Report) -> Situation:
    """Context of a report, for the placeholders of an action."""
    options = report.request.options
    # Provider options have the form PROVIDER.OPTION.
    provider_options = {name: value for name, value in options.items() if "." in name}
    several = {name: split(options.get(name, "")) for name in (*OF_INPUTS, "pin", "provider-library")}
    if report.model is None:  # --input of a generation is a prompt
        opened = [word for name in OF_FOLDER if name in options for word in each(f"--{name}", (options[name],))]
    else:
        opened = [word for name in OF_INPUTS for word in each(f"--{name}", several[name])]
    return Situation(
        report.package,
        report.request.path,
        report.request.chain,
        provider_options,
        report.dry_run.device if report.dry_run is not None else "",
        several["pin"],
        several["provider-library"],
        tuple(opened),
    )


def for_reason(report: Report, code: str, entries: Sequence[Fallback]) -> list[Action]:
    """The actions for a reason that apply to this report."""
    return steps_for(
        situation_of(report),
        code,
        entries[0].preferred_provider,
        unprobed=any(entry.missing_probes for entry in entries),
        trials=[entry.variants for entry in entries],
    )


def top_actions(report: Report, groups: Sequence[tuple[tuple[str, str], Sequence[Fallback]]]) -> Iterator[Action]:
    """The actions for unavailable providers, and for the first reason with actions."""
    for entry in report.chain:
        if entry.status == "unavailable":
            yield from steps_for_provider(situation_of(report), entry.reason, entry.provider)
    for (reason, _), entries in groups:
        found = for_reason(report, reason, entries)
        if found:
            yield from found
            return
