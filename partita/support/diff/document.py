"""Document of the differences between two support tables, for every view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.observations.text_format import name_some
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Document, Line, Pairs, Section, table, text_column
from partita.support.diff.compare import SupportDiff

MOST = 8
"""Maximum variants named in a cell; --json names all."""


def document(found: SupportDiff) -> Document:
    """Every section that is not empty."""
    return Document(
        kind="Difference of two support tables",
        name=f"{found.before.name} and {found.after.name}",
        headline=(found.headline,),
        sections=(_tables(found), *_versions(found), *_operators(found), *_only_one(found)),
    )


VIEWS = Views(document, folded=("tables", "versions"))


def _tables(found: SupportDiff) -> Section:
    """The two tables."""
    rows = tuple(
        (letter, (f"{side.name}: {side.provider}, {side.onnxruntime}, {side.scope}, {side.created}",))
        for letter, side in (("A", found.before), ("B", found.after))
    )
    return Section("tables", "Tables", (Pairs("Tables", rows),))


def _versions(found: SupportDiff) -> Iterator[Section]:
    """Changed versions, devices and options."""
    if found.versions:
        rows = [(each.name, each.before, each.after) for each in found.versions]
        shown = table(
            "Versions and devices", (text_column("property"), text_column("A"), text_column("B")), rows, obvious=True
        )
        yield Section("versions", "Versions and devices", (shown,))


def _operators(found: SupportDiff) -> Iterator[Section]:
    """Changed operators."""
    if found.changes:
        heads = (text_column("operator"), text_column("no longer supported"), text_column("newly supported"))
        rows = [
            (
                f"{change.operator}-{change.since}",
                _some((*change.types_lost, *change.forms_lost)),
                _some((*change.types_gained, *change.forms_gained)),
            )
            for change in found.changes
        ]
        yield Section("operators", "Operators", (table("Operators", heads, rows, obvious=True),))


def _only_one(found: SupportDiff) -> Iterator[Section]:
    """Operator versions with outcomes in one table only."""
    both = (("only in A", found.only_before), ("only in B", found.only_after))
    lines = tuple(Line(name_some(listed), name) for name, listed in both if listed)
    if lines:
        yield Section("alone", "In one table only", lines)


def _some(variants: Sequence[str]) -> str:
    """The first variants and the number of others."""
    return "; ".join(variants[:MOST]) + (f"; and {len(variants) - MOST} more" if len(variants) > MOST else "")
