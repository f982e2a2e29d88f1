"""Comparison of two records as rows: section, group, name and value. Pure.

A record is read as rows. Rows with equal keys are paired; a pair with two values is a change, and ranks decide whether
it is for the worse. Reports, packages, support tables, and a report and its baseline are compared this way.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from partita.observations.grouping import grouped
from partita.observations.records import Record

Value = str | int | float | None
Kind = Literal["report", "package", "support_table"]


class Side(Record):
    """One of the two compared files."""

    name: str
    """Path."""
    description: str
    """Its content, in one line."""
    created: str | None
    failure: str | None = None
    """Why the run of a report failed; null if it did not."""


class Change(Record):
    """One difference."""

    section: str
    group: str
    """Phase of a report (of its versions and options: their subject), operator version of a support table, or empty."""
    name: str
    kind: Literal["added", "removed", "changed"]
    before: Value
    """null: unknown, or only in the second."""
    after: Value
    """null: unknown, or only in the first."""
    effect: Literal["worse", "better", "neutral"]
    details: dict[str, str] = {}
    """Further facts by name: operator, reason, evidence, remedy."""


class Comparison(Record):
    """Differences of the second record from the first."""

    schema_id: Literal["partita.diff/1"] = Field(default="partita.diff/1", alias="schema")
    kind: Kind
    headline: str
    before: Side
    after: Side
    unrelated_reason: str = ""
    """Why two reports are not of the same model; empty if they are."""
    same: bool
    """No difference that counts; in reports those of nodes, reasons, copies, phases and outcome count."""
    changes: tuple[Change, ...]
    equal_rows: int
    """Number of rows that are equal in both."""
    notes: tuple[str, ...] = ()

    def of(self, *sections: str) -> tuple[Change, ...]:
        """The changes of some sections."""
        return tuple(change for change in self.changes if change.section in sections)


@dataclass(frozen=True, slots=True)
class Row:
    """A value of a record."""

    section: str
    group: str
    name: str
    value: Value
    keys: tuple[Hashable, ...] = ()
    """Keys of the same row in the other record, the most precise first. Default: the name."""
    rank: float | None = None
    """A change to a higher rank is for the worse. None: no change is."""
    missing_rank: float | None = None
    """Rank of a record without the row. None: an added or removed row is neither worse nor better."""
    details: Mapping[str, str | None] = field(default_factory=dict)
    """Further facts of a change."""
    causes: Mapping[Value, Mapping[str, str]] = field(default_factory=dict)
    """Former value -> further facts of a change from it; None: from any other value."""


def field_rows(section: str, group: str, values: Mapping[str, object], prefix: str = "") -> Iterator[Row]:
    """A row for each value that is known; a mapping has one for each key."""
    for name, value in values.items():
        for key, each in value.items() if isinstance(value, dict) else [("", value)]:
            text = ", ".join(map(str, each)) if isinstance(each, tuple) else str(each)
            text = f"{each:,}" if type(each) is int else text
            if each is not None and text:
                yield Row(section, group, f"{prefix}{name.replace('_', ' ')} {key}".strip(), text)


def compare_rows(
    kind: Kind, sides: Sequence[Side], rows: Sequence[Iterable[Row]], counted: Collection[str] | None = None
) -> Comparison:
    """The differences of two records, without a headline. `counted`: sections that make them differ; None: all."""
    ours, theirs = (grouped(side, lambda row: row.section) for side in rows)
    changes: list[Change] = []
    equal = 0
    for section in dict.fromkeys((*ours, *theirs)):
        for was, now in pair_rows(ours.get(section, ()), theirs.get(section, ())):
            if was is not None and now is not None and was.value == now.value:
                equal += 1
            else:
                changes.append(_change(was, now))
    return Comparison(
        kind=kind,
        headline="",
        before=sides[0],
        after=sides[1],
        same=not any(counted is None or change.section in counted for change in changes),
        changes=tuple(changes),
        equal_rows=equal,
    )


def pair_rows(before: Sequence[Row], after: Sequence[Row]) -> Iterator[tuple[Row | None, Row | None]]:
    """Pairs of rows with the same key, then rows without a partner.

    Rows are paired by their first key, in order. The others are paired by the next key, if both sides have equally many
    rows with it.
    """
    gone, came = list(before), list(after)
    for at in range(max((len(row.keys) for row in (*before, *after)), default=0) or 1):
        ours, theirs = _by_key(gone, at), _by_key(came, at)
        pairs = [
            pair
            for key, rows in ours.items()
            if not at or len(rows) == len(theirs.get(key, ()))
            for pair in zip(rows, theirs.get(key, ()), strict=False)
        ]
        yield from pairs
        paired = {id(row) for pair in pairs for row in pair}
        gone, came = ([row for row in rows if id(row) not in paired] for rows in (gone, came))
    yield from ((row, None) for row in gone)
    yield from ((None, row) for row in came)


def _by_key(rows: Iterable[Row], at: int) -> Mapping[tuple[str, Hashable], list[Row]]:
    keyed = (row for row in rows if at < len(row.keys or (row.name,)))
    return grouped(keyed, lambda row: (row.group, (row.keys or (row.name,))[at]))


def _change(was: Row | None, now: Row | None) -> Change:
    shown = now or was
    assert shown is not None
    old, new = (shown.missing_rank if row is None else row.rank for row in (was, now))
    effect: Literal["worse", "better", "neutral"] = "neutral"
    if old is not None and new is not None and old != new:
        effect = "worse" if new > old else "better"
    details = dict(shown.details)
    if was is not None:
        details |= {name: text for name, text in was.details.items() if not details.get(name)}
    if now is not None:
        before = None if was is None else was.value
        details |= now.causes.get(before, now.causes.get(None, {}))
    if was is not None and now is not None and now.name in now.keys and was.name != now.name:
        details["former_name"] = was.name
    return Change.copy_of(
        shown,
        kind="added" if was is None else "removed" if now is None else "changed",
        before=was.value if was else None,
        after=now.value if now else None,
        effect=effect,
        details={name: text for name, text in details.items() if text},
    )
