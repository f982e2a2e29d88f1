"""Consistency checks, conflicts between sources, coverage of each source, and notes."""

from __future__ import annotations

from collections.abc import Iterator

from partita.observations.text_format import listing, plural
from partita.partition_reports.records import Report
from partita.partition_reports.sections.model import Block, Fold, Line, Pairs, Section, Table, table, text_column

NAMED = 12
"""Maximum named nodes with conflicting sources; the fold has all."""


def section(report: Report) -> Section:
    """Failed checks, the number of passed checks, and nodes with conflicting sources."""
    failed = [check for check in report.checks if not check.passed]
    passed = len(report.checks) - len(failed)
    blocks: list[Block] = [Line(f"{passed} of {plural(len(report.checks), 'check')} passed")]
    blocks += [Line(f"FAILED {check.name}: {check.detail}", tone="bad") for check in failed]
    blocks += _disagreements(report)
    if report.checks:
        blocks.append(Fold("All checks", (_all_checks(report),)))
    return Section("checks", "Checks", tuple(blocks))


def _all_checks(report: Report) -> Table:
    """Every check, failed ones first."""
    ranked = sorted(report.checks, key=lambda check: check.passed)
    rows = [(check.name, "passed" if check.passed else "FAILED", check.detail) for check in ranked]
    return table("Checks", [text_column(title) for title in ("check", "result", "detail")], rows)


def _disagreements(report: Report) -> Iterator[Block]:
    """Nodes with conflicting sources."""
    phases: dict[tuple[str, str], list[str]] = {}
    for entry in report.conflicts:
        phases.setdefault((entry.node, entry.detail), []).append(entry.phase)
    for (node, detail), names in list(phases.items())[:NAMED]:
        yield Line(f"conflicting sources in {listing(names)} for {node}: {detail}")
    if len(phases) > NAMED:
        yield Line(f"and for {plural(len(phases) - NAMED, 'more node')}")
    if report.conflicts:
        rows = [
            (entry.node, entry.phase, entry.detail, ", ".join(source.replace("_", " ") for source in entry.sources))
            for entry in report.conflicts
        ]
        heads = [text_column(title) for title in ("node", "phase", "detail", "sources")]
        yield Fold("All conflicts", (table("Conflicts between sources", heads, rows),))


def sources(report: Report) -> Section:
    """Coverage of each source, then the notes of the run."""
    rows = tuple(
        (entry.source.replace("_", " "), (entry.covers if entry.available else f"NOT AVAILABLE: {entry.covers}",))
        for entry in report.sources
    )
    notes = tuple(Line(note, "note") for note in report.notes)
    return Section("sources", "Sources", (Pairs("Sources", rows), *notes))
