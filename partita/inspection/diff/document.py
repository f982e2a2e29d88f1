"""Document of the differences between two packages, for every view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.inspection.diff.records import Difference, InspectionDiff
from partita.observations.text_format import families, plural
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Document, Line, Pairs, Section, table, text_column

ROWS = 40
"""Maximum rows of a table; --json has all."""


def document(found: InspectionDiff) -> Document:
    """Every section that is not empty."""
    return Document(
        kind="Difference of two packages",
        name=f"{found.before.path} and {found.after.path}",
        headline=(found.headline,),
        sections=(_sides(found), *_subjects(found)),
    )


VIEWS = Views(document)


def _sides(found: InspectionDiff) -> Section:
    """The two packages."""
    rows = tuple((letter, (side.what,)) for letter, side in (("A", found.before), ("B", found.after)))
    same = Line(f"{plural(found.same, 'identical fact')}", tone="quiet")
    return Section("packages", "Packages", (Pairs("Packages", rows), same))


def _subjects(found: InspectionDiff) -> Iterator[Section]:
    """A section for each subject with differences."""
    for subject in dict.fromkeys(each.subject for each in found.differences):
        rows = list(_rows([each for each in found.differences if each.subject == subject]))
        heads = (text_column("property"), text_column("A"), text_column("B"))
        shown = table(subject.capitalize(), heads, rows, obvious=True, most=ROWS, rest=_more)
        yield Section(subject.replace(" ", "-"), subject.capitalize(), (shown,))


def _rows(differences: Sequence[Difference]) -> Iterator[tuple[str, str, str]]:
    """A row for each change; equal changes of names that differ only in numbers share a row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for each in differences:
        alike.setdefault((each.before or "-", each.after or "-"), []).append(each.name)
    rows = {
        members[0]: (f"{family} ({len(members)})" if len(members) > 1 else family, *ways)
        for ways, names in alike.items()
        for family, members in families(names).items()
    }
    yield from (rows[each.name] for each in differences if each.name in rows)


def _more(shown: int) -> str:
    return f"the first {shown}; the JSON has all"
