"""All sections of a report, by key."""

from __future__ import annotations

from partita.partition_reports.records import Report
from partita.partition_reports.sections import (
    arithmetic,
    cache,
    checks,
    copies,
    dry_run,
    fallbacks,
    layers,
    machine,
    nodes,
    partitions,
    phases,
    placement,
    quantised_weights,
    request,
    speculation,
)
from partita.partition_reports.sections.model import Section

PARTS = (
    phases.section,
    speculation.section,
    dry_run.section,
    fallbacks.section,
    placement.section,
    quantised_weights.section,
    arithmetic.section,
    layers.section,
    partitions.section,
    copies.section,
    cache.section,
    nodes.section,
    checks.section,
    checks.sources,
    request.section,
    machine.section,
)
"""In display order, the most important first."""


def sections(report: Report) -> tuple[Section, ...]:
    """Every section that is not empty."""
    return tuple(found for part in PARTS if (found := part(report)) is not None)
