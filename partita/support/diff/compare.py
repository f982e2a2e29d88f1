"""Comparison of two support tables, of different wheels, devices or providers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from partita.observations.records import Record
from partita.observations.text_format import plural
from partita.support.records import OperatorEntry, SupportTable, VersionEntry

SCHEMA = "partita.support-diff/1"
TRIED = ("supported", "rejected", "failed", "crashed")
Variants = Mapping[tuple[str, ...], bool]
"""Variant -> whether it is supported."""


class TableSide(Record):
    """One of the two tables."""

    name: str
    """File name."""
    created: str
    provider: str
    onnxruntime: str
    scope: str


class VersionOfThing(Record):
    """A changed version or option."""

    name: str
    before: str
    after: str


class OperatorChange(Record):
    """A change in the support of an operator version."""

    operator: str
    since: int
    types_lost: tuple[str, ...]
    """Types that are no longer supported."""
    types_gained: tuple[str, ...]
    forms_lost: tuple[str, ...]
    forms_gained: tuple[str, ...]


class SupportDiff(Record):
    """Differences of the second table from the first."""

    schema_id: Literal["partita.support-diff/1"] = Field(default="partita.support-diff/1", alias="schema")
    headline: str
    before: TableSide
    after: TableSide
    versions: tuple[VersionOfThing, ...]
    changes: tuple[OperatorChange, ...]
    only_before: tuple[str, ...]
    """Operator versions that only the first table has outcomes for."""
    only_after: tuple[str, ...]
    compared: int
    """Variants with an outcome in both tables."""


def compare(before: SupportTable, after: SupportTable, *, names: tuple[str, str]) -> SupportDiff:
    """Compare variants that have an outcome in both tables."""
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
    """One-sentence summary."""
    basis = f"{plural(compared, 'variant')} in both tables"
    if not lost and not gained:
        return f"no difference ({basis})"
    return (
        f"{plural(lost, 'variant')} no longer supported, {gained} newly supported, in "
        f"{plural(versions, 'operator version')} ({basis})"
    )


def _side(table: SupportTable, name: str) -> TableSide:
    """Summary of one table."""
    device = f" (dry run as {table.provider.device})" if table.provider.device else ""
    return TableSide(
        name=name,
        created=table.created,
        provider=f"{table.provider.name}{device}",
        onnxruntime=table.versions.onnxruntime_package or table.versions.onnxruntime,
        scope=table.scope,
    )


def _version_changes(before: SupportTable, after: SupportTable) -> Iterator[VersionOfThing]:
    """Changed versions, devices and options."""
    first, second = _things(before), _things(after)
    for name in dict.fromkeys((*first, *second)):
        if first.get(name, "") != second.get(name, ""):
            yield VersionOfThing(name=name, before=first.get(name, ""), after=second.get(name, ""))


def _things(table: SupportTable) -> dict[str, str]:
    """Name -> value of everything that an outcome may depend on."""
    found: dict[str, Any] = {**table.versions.model_dump(), **table.provider.model_dump(exclude={"options", "name"})}
    found |= {f"option {name}": value for name, value in table.provider.options.items()}
    return {name: ", ".join(value) if isinstance(value, tuple) else str(value or "") for name, value in found.items()}


def _all_versions(table: SupportTable) -> Iterator[tuple[tuple[str, int], VersionEntry]]:
    """Every tested operator version."""
    for entry in table.operators:
        for version in entry.versions:
            if _known(version):
                yield _place_of(entry, version), version


def _place_of(entry: OperatorEntry, version: VersionEntry) -> tuple[str, int]:
    """Operator name and version."""
    return entry.full_name, version.since


def _known(version: VersionEntry) -> Variants:
    """Every variant with an outcome."""
    return {**_types_of(version), **_forms_of(version)}


def _types_of(version: VersionEntry) -> Variants:
    """Type assignments with an outcome."""
    types = version.types
    return {
        ("types", *(f"{name} {kind}" for name, kind in zip(types.variables, row, strict=True) if kind)): taken
        for taken, rows in ((True, types.supported), (False, (*types.rejected, *types.failed, *types.crashed)))
        for row in rows
    }


def _forms_of(version: VersionEntry) -> Variants:
    """Forms with an outcome, by their difference from the example, or by factors if there is none."""
    return {
        ("form", form.kind, form.what or ", ".join(form.factors) or "the example"): form.outcome == "supported"
        for form in version.forms
        if form.outcome in TRIED
    }


def _compare_version(place: tuple[str, int], before: VersionEntry, after: VersionEntry) -> OperatorChange | None:
    """Change of one operator version; None if there is none."""
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
    """Variants whose support changed to `to`."""
    return tuple(_variant_text(key) for key, taken in before.items() if after.get(key) is to and taken is not to)


def _variant_text(key: tuple[str, ...]) -> str:
    """Text of a variant: types with their variables, or the form."""
    return key[2] if key[0] == "form" else ", ".join(key[1:])
