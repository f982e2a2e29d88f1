"""What is asked, in which order: one form of each operator before any has its second, and the newest versions first.

Types are asked about in a form that the provider takes, where there is one: else a form would be mistaken for a type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partita.runtime.support.forms import Form, forms, ranks
from partita.runtime.support.operators import Operator
from partita.runtime.support.variants import Types, Variant, as_example, assignments
from partita.support.answers import Outcome

FIRST_FORMS = 3
"""Forms of a version that are tried before its types; forms with other constants come on top."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One version of an operator, and of its types those that are asked about; None: all."""

    operator: Operator
    types: frozenset[Types] | None = None


class Plan:
    """Variants wave by wave; `answers` (by key) are those known so far, and are looked at between waves."""

    def __init__(self, wanted: Sequence[Wanted], newest: Collection[Operator], answers: Mapping[str, Outcome]) -> None:
        self.answers = answers
        self.forms = {entry.operator: forms(entry.operator) for entry in wanted}
        self.types = {entry.operator: entry.types for entry in wanted}
        self.whole = all(entry.types is None for entry in wanted)
        """Every form and every type is asked about; else the types of a model."""
        self.newest = [entry.operator for entry in wanted if entry.operator in newest]
        self.older = [entry.operator for entry in wanted if entry.operator not in newest]
        self.left_out: dict[Operator, int] = {}
        """Assignments of types beyond the most that are asked about."""

    def waves(self) -> Iterator[list[Variant]]:
        """Lists of variants; each may depend on the answers to the ones before."""
        for group in (self.newest, self.older):
            yield [as_example(form) for operator in group for form in self.first(operator)]
            yield [variant for operator in group for variant in self.typed(operator)]
            if self.whole:
                yield [as_example(form) for operator in group for form in self.forms[operator]]
            yield [variant for operator in group if not self.any_type(operator) for variant in self.typed(operator)]
        if self.whole:
            yield [variant for operator in self.newest for variant in self.ranked(operator)]

    def first(self, operator: Operator) -> list[Form]:
        """The plainest forms."""
        listed = self.forms[operator]
        plain = [form for form in listed if form.kind == "form"][:FIRST_FORMS]
        return [form for form in listed if form.kind != "form" or form in plain]

    def best(self, operator: Operator) -> Form | None:
        """The first form that is taken, else the first that is legal."""
        known = [(form, self.answers.get(as_example(form).key)) for form in self.forms[operator]]
        taken = next((form for form, outcome in known if outcome == "taken"), None)
        return taken or next((form for form, outcome in known if outcome != "invalid"), None)

    def typed(self, operator: Operator) -> Iterator[Variant]:
        """The best form with every assignment of types."""
        best = self.best(operator)
        if best is None:
            return
        listed, more = assignments(best)
        if more:
            self.left_out[operator] = more
        wanted = self.types[operator]
        for types in listed if wanted is None else [types for types in listed if _fits(types, wanted)]:
            yield Variant(best, types, "types")

    def any_type(self, operator: Operator) -> bool:
        """Whether the types were asked about in a form that is taken already, or no form is."""
        best = self.best(operator)
        return (
            best is None
            or self.answers.get(as_example(best).key) != "taken"
            or any(self.answers.get(variant.key) == "taken" for variant in self.typed(operator))
        )

    def ranked(self, operator: Operator) -> Iterator[Variant]:
        """The best form in other ranks."""
        best = self.best(operator)
        if best is not None:
            yield from (as_example(form) for form in ranks(best))


def _fits(types: Types, wanted: Collection[Types]) -> bool:
    """Whether an assignment is one of those that are wanted, which may say nothing of some variables."""
    given = dict(types)
    return any(all(given.get(name, kind) == kind for name, kind in entry) for entry in wanted)
