"""A report as a document, and its views; among its sections checks and sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partita.observations.text_format import listing, plural
from partita.partition_reports.groups import grouped
from partita.partition_reports.records import Report
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections import (
    arithmetic,
    fallbacks,
    kernels,
    machine,
    overview,
    partitions,
    phases,
    placement,
)
from partita.partition_reports.sections.model import Block, Document, Fold, Line, Pairs, Section, table

NAMED_CONFLICTS = 12
"""Maximum named nodes with conflicting sources; the fold has all."""


def checks_section(report: Report) -> Section:
    """Failed checks, the number of passed checks, and nodes with conflicting sources."""
    failed = [check for check in report.checks if not check.passed]
    passed = len(report.checks) - len(failed)
    blocks: list[Block] = [Line(f"{passed} of {plural(len(report.checks), 'check')} passed")]
    blocks += [Line(f"FAILED {check.name}: {check.detail}", tone="bad") for check in failed]
    blocks += _conflicts(report)
    if report.checks:
        ranked = sorted(report.checks, key=lambda check: check.passed)
        rows = [(check.name, "passed" if check.passed else "FAILED", check.detail) for check in ranked]
        blocks.append(Fold("All checks", (table("Checks", ("check", "result", "detail"), rows),)))
    return Section("checks", "Checks", tuple(blocks))


def _conflicts(report: Report) -> Iterator[Block]:
    """Nodes with conflicting sources."""
    found = grouped(report.conflicts, lambda entry: (entry.node, entry.detail))
    for (node, detail), entries in list(found.items())[:NAMED_CONFLICTS]:
        yield Line(f"conflicting sources in {listing(entry.phase for entry in entries)} for {node}: {detail}")
    if len(found) > NAMED_CONFLICTS:
        yield Line(f"and for {plural(len(found) - NAMED_CONFLICTS, 'more node')}")
    if report.conflicts:
        rows = [
            (entry.node, entry.phase, entry.detail, ", ".join(source.replace("_", " ") for source in entry.sources))
            for entry in report.conflicts
        ]
        heads = ("node", "phase", "detail", "sources")
        yield Fold("All conflicts", (table("Conflicts between sources", heads, rows),))


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
    arithmetic.quantised_section,
    arithmetic.floats_section,
    placement.layers_section,
    phases.work_section,
    partitions.section,
    partitions.copies_section,
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
        headline=(f"{name}: {overview.headline(report)}",),
        sections=sections(report),
        opening=tuple(overview.opening(report)),
        created=report.created,
        version=report.partita_version,
        sign=sign,
        tone=tone,
    )


VIEWS = Views(document, modules={"model-explorer": "partita.partition_reports.model_explorer"})
