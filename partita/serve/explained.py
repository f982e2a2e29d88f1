"""What experiments told at the start, in the reports that are made later: nobody is to wait for experiments then."""

from __future__ import annotations

from collections.abc import Sequence

from partita.observations.records import ChainEntry
from partita.partition_reports.records import Report, SourceStatement
from partita.partition_reports.summary import summarise


def explained(report: Report, first: Report | None) -> Report:
    """A report with what the experiments of an earlier one of the same package told: why the same nodes are not on the
    same provider. As it is without any, and where another provider is there or missing since.
    """
    if first is None or first.probing is None or _present(report.chain) != _present(first.chain):
        return report
    known = {(entry.phase, entry.node, entry.wanted, entry.provider): entry for entry in first.fallbacks}
    fallbacks = []
    for entry in report.fallbacks:
        told = known.get((entry.phase, entry.node, entry.wanted, entry.provider))
        fallbacks.append(entry if told is None else told.model_copy(update={"cost": entry.cost}))
    probes: dict[str, SourceStatement] = {entry.source: entry for entry in first.sources if entry.source == "probe"}
    found = report.model_copy(
        update={
            "chain": first.chain,
            "fallbacks": tuple(fallbacks),
            "rejected": first.rejected,
            "probing": first.probing,
            "sources": tuple(probes.get(entry.source, entry) for entry in report.sources),
            "notes": tuple(dict.fromkeys((*report.notes, *first.notes))),
        }
    )
    return found.model_copy(update={"summary": summarise(found)})


def _present(chain: Sequence[ChainEntry]) -> list[tuple[str, str]]:
    """Which providers of a chain are there; what is said of one that is missing may be what experiments told."""
    return [(entry.provider, entry.status) for entry in chain]
