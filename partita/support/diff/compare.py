"""What is different between two support tables: of two wheels, two devices, two providers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from partita.observations.records import Record
from partita.observations.text_format import plural
from partita.support.records import OperatorEntry, SupportTable, VersionEntry

SCHEMA = "partita.support-diff/1"
TRIED = ("taken", "left", "failed", "crashed")
Variants = Mapping[tuple[str, ...], bool]
"""Whether each is taken."""


class TableSide(Record):
    """One of the two tables."""

    name: str
    """What the user called it: the file."""
    created: str
    provider: str
    onnxruntime: str
    asked: str


class VersionOfThing(Record):
    """A version or an option that is another one."""

    name: str
    before: str
    after: str


class OperatorChange(Record):
    """A version of an operator of which something else is taken than before."""

    operator: str
    since: int
    types_lost: tuple[str, ...]
    """Types that were taken and are not now."""
    types_gained: tuple[str, ...]
    forms_lost: tuple[str, ...]
    forms_gained: tuple[str, ...]


class SupportDiff(Record):
    """What is different in the second table."""

    schema_id: Literal["partita.support-diff/1"] = Field(default="partita.support-diff/1", alias="schema")
    headline: str
    before: TableSide
    after: TableSide
    versions: tuple[VersionOfThing, ...]
    changes: tuple[OperatorChange, ...]
    only_before: tuple[str, ...]
    """Versions of operators that only the first table has answers about."""
    only_after: tuple[str, ...]
    compared: int
    """Variants that both tables have an answer about."""


def compare(before: SupportTable, after: SupportTable, *, names: tuple[str, str]) -> SupportDiff:
    """Compare variant by variant; one that either table has no answer about is not compared."""
    first, second = dict(_all_versions(before)), dict(_all_versions(after))
    both = [place for place in first if place in second]
    changes = [change for place in both if (change := _compare_version(place, first[place], second[place])) is not None]
    lost = sum(len(change.types_lost) + len(change.forms_lost) for change in changes)
    gained = sum(len(change.types_gained) + len(change.forms_gained) for change in changes)
    compared = sum(len(_known(first[place]).keys() & _known(second[place]).keys()) for place in both)
    return SupportDiff(
        headline=headline(lost, gained, len(changes), compared),
        before=_side(before, names[0]),
        after=_side(after, names[1]),
        versions=tuple(_version_changes(before, after)),
        changes=tuple(changes),
        only_before=tuple(f"{name}-{since}" for name, since in first if (name, since) not in second),
        only_after=tuple(f"{name}-{since}" for name, since in second if (name, since) not in first),
        compared=compared,
    )


def headline(lost: int, gained: int, versions: int, compared: int) -> str:
    """The answer in a sentence."""
    told = f"of {plural(compared, 'variant')} that both have an answer about"
    if not lost and not gained:
        return f"no difference: {told}, the same are taken"
    return (
        f"{plural(lost, 'variant')} no longer taken, {gained} newly taken, in {plural(versions, 'version')} of "
        f"operators, {told}"
    )


def _side(table: SupportTable, name: str) -> TableSide:
    """One table in a few words."""
    device = f" (dry run as {table.provider.device})" if table.provider.device else ""
    return TableSide(
        name=name,
        created=table.created,
        provider=f"{table.provider.name}{device}",
        onnxruntime=table.versions.onnxruntime_package or table.versions.onnxruntime,
        asked=table.asked,
    )


def _version_changes(before: SupportTable, after: SupportTable) -> Iterator[VersionOfThing]:
    """Versions, devices and options that are others."""
    first, second = _things(before), _things(after)
    for name in dict.fromkeys((*first, *second)):
        if first.get(name, "") != second.get(name, ""):
            yield VersionOfThing(name=name, before=first.get(name, ""), after=second.get(name, ""))


def _things(table: SupportTable) -> dict[str, str]:
    """What an answer may depend on, by name."""
    found: dict[str, Any] = {**table.versions.model_dump(), **table.provider.model_dump(exclude={"options", "name"})}
    found |= {f"option {name}": value for name, value in table.provider.options.items()}
    return {name: ", ".join(value) if isinstance(value, tuple) else str(value or "") for name, value in found.items()}


def _all_versions(table: SupportTable) -> Iterator[tuple[tuple[str, int], VersionEntry]]:
    """Every version of every operator that was tried."""
    for entry in table.operators:
        for version in entry.versions:
            if _known(version):
                yield _place_of(entry, version), version


def _place_of(entry: OperatorEntry, version: VersionEntry) -> tuple[str, int]:
    """Name and version."""
    return entry.full_name, version.since


def _known(version: VersionEntry) -> Variants:
    """Every variant with an answer."""
    return {**_types_of(version), **_forms_of(version)}


def _types_of(version: VersionEntry) -> Variants:
    """Assignments of types with an answer."""
    types = version.types
    return {
        ("types", *(f"{name} {kind}" for name, kind in zip(types.variables, row, strict=True) if kind)): taken
        for taken, rows in ((True, types.taken), (False, (*types.left, *types.failed, *types.crashed)))
        for row in rows
    }


def _forms_of(version: VersionEntry) -> Variants:
    """Forms with an answer, by what is other than in the example, which alone tells all of them apart, and by factors
    where nothing is.
    """
    return {
        ("form", form.kind, form.what or ", ".join(form.factors) or "the example"): form.outcome == "taken"
        for form in version.forms
        if form.outcome in TRIED
    }


def _compare_version(place: tuple[str, int], before: VersionEntry, after: VersionEntry) -> OperatorChange | None:
    """What is different in one version of an operator; None when nothing is."""
    types = _types_of(before), _types_of(after)
    forms = _forms_of(before), _forms_of(after)
    change = OperatorChange(
        operator=place[0],
        since=place[1],
        types_lost=_moved(*types, to=False),
        types_gained=_moved(*types, to=True),
        forms_lost=_moved(*forms, to=False),
        forms_gained=_moved(*forms, to=True),
    )
    any_change = change.types_lost or change.types_gained or change.forms_lost or change.forms_gained
    return change if any_change else None


def _moved(before: Variants, after: Variants, *, to: bool) -> tuple[str, ...]:
    """Variants with an answer in both tables, which is `to` in the second only."""
    return tuple(_said(key) for key, taken in before.items() if after.get(key) is to and taken is not to)


def _said(key: tuple[str, ...]) -> str:
    """A variant as it is told: types with their variables, a form by what it is."""
    return key[2] if key[0] == "form" else ", ".join(key[1:])
