"""Comparison of two records as rows: section, group, name and value. Pure.

A record is read as rows. Rows with equal keys are paired. A rule per section decides which pairs are changes, and which
changes are worse. Reports, packages, support tables, and a report and its baseline are compared this way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from partita.observations.records import Record
from partita.partition_reports.groups import grouped

Value = str | int | float | None


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
    kind: Literal["report", "package", "support_table"]
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
    source: Any = None
    """The record that the row was made from, for rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Comparison of the rows of a section. A missing row is None."""

    is_same: Callable[[Row, Row], bool] = lambda was, now: was.value == now.value
    is_worse: Callable[[Row | None, Row | None], bool] = lambda was, now: False
    """Whether the second row is worse than the first."""
    details: Callable[[Row | None, Row | None], Mapping[str, str | None]] = lambda was, now: {}


DEFAULT = Rule()


def compare_rows(
    before: Iterable[Row], after: Iterable[Row], rules: Mapping[str, Rule]
) -> tuple[tuple[Change, ...], int]:
    """The changes, in the order of the rows' sections, and the number of equal rows."""
    ours, theirs = (grouped(rows, lambda row: row.section) for rows in (before, after))
    changes: list[Change] = []
    equal = 0
    for section in dict.fromkeys((*ours, *theirs)):
        rule = rules.get(section, DEFAULT)
        for was, now in pair_rows(ours.get(section, ()), theirs.get(section, ())):
            if was is not None and now is not None and rule.is_same(was, now):
                equal += 1
            else:
                changes.append(_change(was, now, rule))
    return tuple(changes), equal


def pair_rows(before: Sequence[Row], after: Sequence[Row]) -> Iterator[tuple[Row | None, Row | None]]:
    """Pairs of rows with the same key, then rows without a partner.

    Rows are paired by their first key, in order. The others are paired by the next key, if both sides have equally many
    rows with it.
    """
    gone, came = list(before), list(after)
    for rank in range(max((len(row.keys) for row in (*before, *after)), default=0) or 1):
        ours, theirs = _by_key(gone, rank), _by_key(came, rank)
        pairs = [
            pair
            for key, rows in ours.items()
            if not rank or len(rows) == len(theirs.get(key, ()))
            for pair in zip(rows, theirs.get(key, ()), strict=False)
        ]
        yield from pairs
        paired = {id(row) for pair in pairs for row in pair}
        gone, came = ([row for row in rows if id(row) not in paired] for rows in (gone, came))
    yield from ((row, None) for row in gone)
    yield from ((None, row) for row in came)


def _by_key(rows: Iterable[Row], rank: int) -> Mapping[tuple[str, Hashable], list[Row]]:
    ranked = (row for row in rows if rank < len(row.keys or (row.name,)))
    return grouped(ranked, lambda row: (row.group, (row.keys or (row.name,))[rank]))


def _change(was: Row | None, now: Row | None, rule: Rule) -> Change:
    shown = now or was
    assert shown is not None
    return Change(
        section=shown.section,
        group=shown.group,
        name=shown.name,
        kind="added" if was is None else "removed" if now is None else "changed",
        before=was.value if was else None,
        after=now.value if now else None,
        effect="worse" if rule.is_worse(was, now) else "better" if rule.is_worse(now, was) else "neutral",
        details={name: text for name, text in rule.details(was, now).items() if text},
    )


def is_more(was: Row | None, now: Row | None) -> bool:
    """Whether a number is larger, or unknown on one side only."""
    if was is None or now is None or was.value == now.value:
        return False
    ours, theirs = was.value, now.value
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return theirs > ours
    return True


def count_names(changes: Iterable[Change]) -> int:
    """Number of changed nodes: a name in several groups counts once, a repeated name in one group several times."""
    groups: dict[str, Counter[str]] = {}
    for change in changes:
        groups.setdefault(change.group, Counter())[change.name] += 1
    most: Counter[str] = Counter()
    for counted in groups.values():
        most |= counted
    return most.total()
