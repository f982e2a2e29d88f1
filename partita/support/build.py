"""Builds the support table from measured outcomes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from partita import dtypes
from partita.observations.grouping import grouped
from partita.support.records import (
    Assignments,
    Condition,
    FormEntry,
    Measurement,
    Measurements,
    Message,
    ModelNeed,
    OperatorEntry,
    Outcome,
    SupportLevel,
    SupportTable,
    VersionEntry,
)

MOST_MESSAGES = 5
"""Maximum distinct messages per operator version."""
UNSUPPORTED = frozenset({"rejected", "failed", "crashed"})
Place = tuple[str, str, int]
"""Domain, operator, and the operator set version that introduced this version of it."""


def build_table(measured: Measurements, **facts: object) -> SupportTable:
    """The table; operators in alphabetical order, ai.onnx first. `facts`: its fields that are not measured."""
    places = grouped(measured.results, lambda answer: (answer.domain, answer.operator, answer.since))
    beyond, counted = dict(measured.untested_counts), Counter[str](answer.outcome for answer in measured.results)
    entries = {place: _version_entry(places[place], beyond.get(place, 0)) for place in sorted(places)}
    return SupportTable.copy_of(
        measured,
        variants={outcome: counted[outcome] for outcome in get_args(Outcome)},
        operators=tuple(
            OperatorEntry(domain=domain, name=name, versions=tuple(entries[place] for place in own))
            for (domain, name), own in grouped(entries, lambda place: place[:2]).items()
        ),
        model_operators=tuple(_model_need(need, places) for need in measured.model_nodes),
        **facts,
    )


def _version_entry(answers: Sequence[Measurement], beyond: int) -> VersionEntry:
    """The entry of one operator version."""
    forms = [answer for answer in answers if answer.kind != "types"]
    typed = [answer for answer in answers if answer.kind == "types" and answer.outcome in UNSUPPORTED]
    found, unexplained = deciding_factors(
        [_with_types(answer) for answer in forms if answer.outcome == "supported"],
        [_with_types(answer) for answer in forms if answer.outcome in UNSUPPORTED and not _by_types(answer, typed)],
    )
    found_verdict = support_level(answers)
    telling = {"invalid"} if found_verdict == "invalid" else UNSUPPORTED
    messages = Counter(answer.message for answer in answers if answer.message and answer.outcome in telling)
    return VersionEntry.copy_of(
        answers[0],
        verdict=found_verdict,
        types=_assignments([answer for answer in answers if answer.kind == "types"], beyond),
        forms=tuple(FormEntry.copy_of(answer, factors=tuple(sorted(answer.factors))) for answer in forms),
        conditions=found,
        unexplained=unexplained,
        messages=tuple(Message(text=text, variants=count) for text, count in messages.most_common(MOST_MESSAGES)),
    )


def _with_types(answer: Measurement) -> frozenset[str]:
    """The factors of a form, including its types, which may differ from those of other forms."""
    return answer.factors | {f"{name} {short(kind)}" for name, kind in answer.types}


def _by_types(form: Measurement, refused: Iterable[Measurement]) -> bool:
    """Whether a form is explained by its types, which are unsupported in another form, too."""
    given = dict(form.types)
    return any(all(given.get(name, kind) == kind for name, kind in answer.types) for answer in refused)


def support_level(answers: Iterable[Measurement]) -> SupportLevel:
    """Summary of all outcomes of an operator version."""
    outcomes = {answer.outcome for answer in answers}
    if "supported" in outcomes:
        return "partly" if outcomes & UNSUPPORTED else "supported"
    if outcomes & UNSUPPORTED:
        return "rejected"
    return "invalid" if outcomes == {"invalid"} else "untested"


def _assignments(answers: Sequence[Measurement], beyond: int) -> Assignments:
    """Type assignments by outcome; the type is empty for a variable without input in a form."""
    variables = tuple(dict.fromkeys(name for answer in answers for name, _ in answer.types))

    def rows(listed: Iterable[Measurement]) -> tuple[tuple[str, ...], ...]:
        given = (dict(answer.types) for answer in listed)
        return tuple(tuple(short(types[name]) if name in types else "" for name in variables) for types in given)

    found = {outcome: rows(listed) for outcome, listed in grouped(answers, lambda answer: answer.outcome).items()}
    replaced = rows(answer for answer in answers if answer.replaced)
    return Assignments(variables=variables, replaced=replaced, beyond_limit=beyond, **found)


def short(kind: str) -> str:
    """Short name of a type: float32, seq(int64)."""
    outer, _, inner = kind.partition("(")
    if not inner:
        return dtypes.usual(kind)
    if outer == "tensor":
        return dtypes.usual(inner[:-1])
    if outer == "map":
        key, _, value = inner[:-1].partition(",")
        return f"map({dtypes.usual(key.strip())}, {short(value.strip())})"
    return f"{outer}({short(inner[:-1])})"


def _model_need(need: ModelNeed, places: Mapping[Place, Sequence[Measurement]]) -> ModelNeed:
    """Nodes of the model with the best outcome of the variants that match their known types."""
    typed = [each for each in places.get((need.domain, need.operator, need.since), ()) if each.kind == "types"]
    outcomes = {
        answer.outcome
        for answer in typed
        if all(dict(answer.types).get(name, kind) == kind for name, kind in need.types.items())
    }
    best: tuple[Outcome, ...] = ("supported", "rejected", "failed", "crashed", "invalid")
    types = {name: short(kind) for name, kind in need.types.items()}
    return need.model_copy(
        update={"types": types, "outcome": next((each for each in best if each in outcomes), "untested")}
    )


def deciding_factors(
    supported: Sequence[frozenset[str]], unsupported: Sequence[frozenset[str]]
) -> tuple[tuple[Condition, ...], int]:
    """A small set of factors that no supported form has, and the number of unsupported forms without any of them.

    Without any supported form, no factors are returned.
    """
    if not supported:
        return (), 0
    harmless = frozenset().union(*supported)
    open_forms = set(range(len(unsupported)))
    found: list[Condition] = []
    while True:
        factors = frozenset[str]().union(*(unsupported[number] for number in open_forms)) - harmless
        # Factors of exactly the same forms are not separable.
        groups = grouped(factors, lambda factor: frozenset(n for n in open_forms if factor in unsupported[n]))
        if not groups:
            return tuple(found), len(open_forms)
        covered = max(groups, key=lambda forms: (len(forms), [-number for number in sorted(forms)]))
        found.append(Condition(factors=tuple(sorted(groups[covered])), forms=len(covered)))
        open_forms.difference_update(covered)
