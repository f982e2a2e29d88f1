"""What can be asked of a report, as its caller writes it, and as the gate that it means."""

from __future__ import annotations

from partita.check.gate import Gate
from partita.check.limits import Limits, check_limits
from partita.check.requirements import Vocabulary, parse_requirement
from partita.diagnosis.reasons.base import load_reasons
from partita.errors import UsageError
from partita.options.reports import CheckOptions
from partita.partition_reports.records import Report
from partita.providers.resolve import parse_chain


def gate_of(wanted: CheckOptions, words: Vocabulary, *, baseline: bool) -> Gate:
    """What is wanted as a gate. `baseline`: there is a report to keep up with.

    Raises UsageError for what makes no sense.
    """
    limits = Limits.of(wanted)
    check_limits(limits, ())
    if wanted.max_slowdown is not None and not baseline:
        raise UsageError("`max_slowdown` needs `baseline` to compare with")
    return Gate(
        limits=limits,
        max_unexplained=wanted.max_unexplained,
        cache_in_place=wanted.cache_in_place,
        min_tokens_per_second=wanted.min_tokens_per_second,
        requirements=tuple(parse_requirement(text, words) for text in wanted.require),
        max_slowdown=wanted.max_slowdown,
    )


def vocabulary(report: Report) -> Vocabulary:
    """Names of providers and reasons that a requirement may use; a plugin's provider is known by its report only."""
    seen = [entry.provider for entry in report.chain]
    seen += [entry.provider for phase in report.phases for entry in phase.providers]

    def provider(name: str) -> str:
        found = next((entry for entry in seen if name.casefold() == entry.casefold()), None)
        if found is not None:
            return found
        return parse_chain(name, argument="require")[0].ort_name

    return Vocabulary(provider, tuple(reason.code for reason in load_reasons()))
