"""Document of the result of a check, for every view."""

from __future__ import annotations

from partita.check.gate import GateResult
from partita.observations.text_format import plural
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Document, Row, Section, table, text_column


def document(result: GateResult) -> Document:
    """The document; failed requirements come first."""
    ranked = sorted(result.outcomes, key=lambda outcome: outcome.met)
    heads = (text_column("check"), text_column("holds"), text_column("found"))
    rows = [Row((outcome.check, "yes" if outcome.met else "NO", outcome.detail)) for outcome in ranked]
    section = Section("checks", "Checks", (table("Requirements", heads, rows, obvious=True),))
    return Document(
        kind="Check of a report",
        name=result.report,
        headline=(headline(result),),
        sections=(section,) if rows else (),
    )


VIEWS = Views(document, own={"text": "partita.check.text"})


def headline(result: GateResult) -> str:
    """One line: failed requirements, or that all hold."""
    if result.passed:
        return f"{result.report}: {plural(len(result.outcomes), 'check')} passed"
    failed = [outcome.check for outcome in result.outcomes if not outcome.met]
    count = f"{len(failed)} of {plural(len(result.outcomes), 'check')}"
    return f"{result.report}: {count} failed: {', '.join(failed)}"
