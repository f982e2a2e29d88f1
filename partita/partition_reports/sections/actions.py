"""What can be done about what a report shows, as commands with everything filled in that the report knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partita.partition_reports.reasons.base import Step, load_reasons
from partita.partition_reports.records import ChainEntry, Fallback, Report
from partita.partition_reports.wording import short_provider

CHECKPOINT, PATH = "CHECKPOINT", "PATH"
"""Stand for what the report does not know."""


@dataclass(frozen=True, slots=True)
class Action:
    """A command, and what it does."""

    title: str
    words: tuple[str, ...]
    does: str


def for_reason(report: Report, code: str, entries: Sequence[Fallback]) -> list[Action]:
    """The steps of a reason that make sense for this report: a package can be exported anew, and not as it is."""
    steps = next((reason.steps for reason in load_reasons() if reason.code == code), ())
    unprobed = any(entry.unprobed for entry in entries)
    return [fill(report, entries[0].wanted, step) for step in steps if makes_sense(report, step, entries[0], unprobed)]


def for_provider(entry: ChainEntry) -> list[Action]:
    """The steps of a reason for which a provider is not there."""
    steps = next((reason.steps for reason in load_reasons() if reason.code == entry.reason), ())
    return [written(step, {"provider": provider_name(entry.provider)}) for step in steps]


def makes_sense(report: Report, step: Step, entry: Fallback, unprobed: bool) -> bool:
    """Whether a step can be taken, and changes something."""
    package = report.package
    if step.exports and package is None:
        return False
    if step.chooses_lowering and package is not None and package.target == provider_name(entry.wanted):
        return False
    field, same = step.unless
    if field and package is not None and getattr(package, field) == same:
        return False
    return unprobed or not step.probes


def fill(report: Report, wanted: str, step: Step) -> Action:
    """The step with the blanks filled in."""
    provider = provider_name(wanted)
    package, path = report.package, report.request.path
    known = package.checkpoint if package is not None and "/" in package.checkpoint else ""
    blanks = {
        "checkpoint": known or CHECKPOINT,
        "out": f"{package.name if package is not None else 'package'}-for-{provider}",
        "path": PATH if path is None else path,
        "provider": provider,
        "chain": ",".join(map(provider_name, report.request.chain)) or provider,
    }
    return written(step, blanks)


def written(step: Step, blanks: Mapping[str, str]) -> Action:
    """The step with its blanks filled in, word by word."""
    words = tuple(word.format(**blanks) for word in step.command.split())
    return Action(step.title.format(**blanks), words, step.does.format(**blanks))


def provider_name(provider: str) -> str:
    """A name that --provider takes, for one of ONNX Runtime's."""
    return short_provider(provider).lower()


def top_actions(report: Report, groups: Sequence[tuple[tuple[str, str], Sequence[Fallback]]]) -> Iterator[Action]:
    """The steps for providers that are not there, and for the first reason that has any."""
    for entry in report.chain:
        if entry.status == "unavailable":
            yield from for_provider(entry)
    for (reason, _), entries in groups:
        found = for_reason(report, reason, entries)
        if found:
            yield from found
            return
