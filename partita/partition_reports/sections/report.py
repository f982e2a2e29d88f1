"""A report as a document, and its views; among its sections checks and sources."""

from __future__ import annotations

from dataclasses import replace

from partita.observations.text_format import listing, plural
from partita.partition_reports.groups import grouped
from partita.partition_reports.outcome import headline
from partita.partition_reports.records import Report
from partita.partition_reports.render.show import View, Views
from partita.partition_reports.sections import (
    copies,
    fallbacks,
    kernels,
    machine,
    overview,
    phases,
    placement,
)
from partita.partition_reports.sections.model import Document, Line, Pairs, Section

NAMED_CONFLICTS = 12
"""Maximum named nodes with conflicting sources; the JSON has all."""


def checks_section(report: Report) -> Section:
    """Failed checks, the number of passed checks, and nodes with conflicting sources."""
    failed = [check for check in report.checks if not check.passed]
    passed = len(report.checks) - len(failed)
    blocks = [Line(f"{passed} of {plural(len(report.checks), 'check')} passed")]
    blocks += [Line(f"FAILED {check.name}: {check.detail}", tone="bad") for check in failed]
    found = grouped(report.conflicts, lambda entry: (entry.node, entry.detail))
    for (node, detail), entries in list(found.items())[:NAMED_CONFLICTS]:
        blocks.append(Line(f"conflicting sources in {listing(entry.phase for entry in entries)} for {node}: {detail}"))
    if len(found) > NAMED_CONFLICTS:
        blocks.append(Line(f"and for {plural(len(found) - NAMED_CONFLICTS, 'more node')}; the JSON has all"))
    return Section("checks", "Checks", tuple(blocks))


def sources_section(report: Report) -> Section:
    """Coverage of each source, then the notes of the run."""
    rows = tuple(
        (entry.source.replace("_", " "), (entry.covers if entry.available else f"NOT AVAILABLE: {entry.covers}",))
        for entry in report.sources
    )
    notes = tuple(Line(note, "note") for note in report.notes)
    return Section("sources", "Sources", (Pairs("Sources", rows), *notes))


PARTS = (
    phases.section,
    phases.speculation_section,
    machine.dry_run_section,
    fallbacks.section,
    kernels.section,
    placement.section,
    placement.layers_section,
    phases.work_section,
    copies.section,
    phases.cache_section,
    placement.nodes_section,
    checks_section,
    sources_section,
    machine.request_section,
    machine.section,
)
"""In display order, the most important first."""


EXPANDED = ("phases", "fallbacks")
"""Sections that are not collapsed in Markdown."""


def sections(report: Report) -> tuple[Section, ...]:
    """Every section that is not empty."""
    found = filter(None, (part(report) for part in PARTS))
    return tuple(replace(section, folded=section.key not in EXPANDED) for section in found)


def document(report: Report) -> Document:
    """The report as a document."""
    name = overview.model_name(report)
    sign, tone = overview.sign_and_tone(report)
    return Document(
        kind="Partition report",
        name=name,
        headline=(f"{name}: {headline(report)}",),
        sections=sections(report),
        opening=tuple(overview.opening(report)),
        created=report.created,
        version=report.partita_version,
        sign=sign,
        tone=tone,
    )


def _node_data() -> View:
    from partita.partition_reports.model_explorer import VIEW

    return VIEW


VIEWS = Views(document, own={"model-explorer": _node_data})
