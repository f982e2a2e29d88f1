"""What decides over forms: the factors that those which are not taken have, and none that is taken has. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deciding:
    """Factors that come in the same forms, of which none is taken; which of them it is was not tried."""

    factors: tuple[str, ...]
    forms: int


def deciding(taken: Sequence[frozenset[str]], others: Sequence[frozenset[str]]) -> tuple[tuple[Deciding, ...], int]:
    """The fewest factors that tell all `others` from those that are taken, and how many forms none of them tells.

    Nothing can be told where nothing is taken.
    """
    if not taken:
        return (), 0
    harmless = frozenset().union(*taken)
    open_forms = set(range(len(others)))
    found: list[Deciding] = []
    while True:
        groups = _by_forms(others, harmless, open_forms)
        if not groups:
            return tuple(found), len(open_forms)
        covered = max(groups, key=lambda forms: (len(forms), [-number for number in sorted(forms)]))
        found.append(Deciding(tuple(sorted(groups[covered])), len(covered)))
        open_forms -= covered


def _by_forms(
    others: Sequence[frozenset[str]], harmless: frozenset[str], still: set[int]
) -> dict[frozenset[int], list[str]]:
    """Factors that no taken form has, by the forms that have them."""
    found: dict[str, set[int]] = {}
    for number, factor in _pairs(others, harmless, still):
        found.setdefault(factor, set()).add(number)
    groups: dict[frozenset[int], list[str]] = {}
    for factor, forms in found.items():
        groups.setdefault(frozenset(forms), []).append(factor)
    return groups


def _pairs(others: Sequence[frozenset[str]], harmless: frozenset[str], still: set[int]) -> Iterator[tuple[int, str]]:
    """Every form that is still open with every factor of it that may decide."""
    for number in sorted(still):
        for factor in sorted(others[number] - harmless):
            yield number, factor
