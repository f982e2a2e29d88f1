"""Comparison of two support tables, of different wheels, devices or providers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from partita.compare.rows import Comparison, Row, Rule, Side, compare_rows
from partita.observations.text_format import plural
from partita.support.records import SupportTable, VersionEntry

TESTED = ("supported", "rejected", "failed", "crashed")
Variants = Mapping[str, Mapping[tuple[str, str], str]]
"""Operator version -> variant (kind and text) -> `supported` or `unsupported`."""


def compare_tables(before: SupportTable, after: SupportTable, *, names: tuple[str, str]) -> Comparison:
    """Compare variants that have an outcome in both tables. `names`: names of the two tables."""
    first, second = _variants(before), _variants(after)
    rules = {"variants": Rule(is_worse=lambda was, now: now is not None and now.value == "unsupported")}
    changes, equal = compare_rows(_rows(before, first, second), _rows(after, second, first), rules)
    sides = [_side(table, name) for table, name in zip((before, after), names, strict=True)]
    made = [change for change in changes if change.section == "variants"]
    lost = sum(change.effect == "worse" for change in made)
    compared = sum(len(found.keys() & second[name].keys()) for name, found in first.items() if name in second)
    text = f"no difference ({plural(compared, 'variant')} in both tables)"
    if made:
        text = (
            f"{plural(lost, 'variant')} no longer supported, {len(made) - lost} newly supported, in "
            f"{plural(len({change.group for change in made}), 'operator version')} "
            f"({plural(compared, 'variant')} in both tables)"
        )
    return Comparison(
        kind="support_table",
        headline=text,
        before=sides[0],
        after=sides[1],
        same=not made,
        changes=changes,
        equal_rows=equal,
    )


def _side(table: SupportTable, name: str) -> Side:
    """Summary of one table."""
    device = f" (dry run as {table.provider.device})" if table.provider.device else ""
    version = table.versions.onnxruntime_package or table.versions.onnxruntime
    return Side(
        name=name, description=f"{table.provider.name}{device}, {version}, {table.scope}", created=table.created
    )


def _rows(table: SupportTable, own: Variants, other: Variants) -> Iterator[Row]:
    """Versions and options, tested operator versions, and variants that are in both tables."""
    provider = table.provider
    found: dict[str, Any] = {**table.versions.model_dump(), **provider.model_dump(exclude={"options", "name"})}
    found |= {f"option {name}": value for name, value in provider.options.items()}
    for name, value in found.items():
        if value:
            yield Row("versions", "", name, ", ".join(value) if isinstance(value, tuple) else str(value))
    for version, variants in own.items():
        yield Row("coverage", "", version, "tested")
        for variant, outcome in variants.items():
            if variant in other.get(version, {}):
                yield Row("variants", version, variant[1], outcome, (variant,))


def _variants(table: SupportTable) -> Variants:
    """Every variant with an outcome."""
    found = {
        f"{entry.full_name}-{version.since}": dict(_outcomes(version))
        for entry in table.operators
        for version in entry.versions
    }
    return {name: variants for name, variants in found.items() if variants}


def _outcomes(version: VersionEntry) -> Iterator[tuple[tuple[str, str], str]]:
    """Type assignments, and forms by their difference from the example, or by factors if there is none."""
    types = version.types
    for outcome, rows in (
        ("supported", types.supported),
        ("unsupported", (*types.rejected, *types.failed, *types.crashed)),
    ):
        for row in rows:
            named = (f"{name} {kind}" for name, kind in zip(types.variables, row, strict=True) if kind)
            yield ("types", ", ".join(named)), outcome
    for form in version.forms:
        if form.outcome in TESTED:
            text = form.difference or ", ".join(form.factors) or "the example"
            yield (form.kind, text), "supported" if form.outcome == "supported" else "unsupported"
