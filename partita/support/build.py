"""Builds the support table from measured outcomes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from partita import dtypes
from partita.support.records import (
    Assignments,
    Condition,
    Counts,
    FormEntry,
    Measurement,
    Measurements,
    Message,
    ModelNeed,
    ModelNodes,
    OperatorEntry,
    Outcome,
    ProviderFacts,
    SupportLevel,
    SupportTable,
    VersionEntry,
    Versions,
)

MOST_MESSAGES = 5
"""Maximum distinct messages per operator version."""
UNSUPPORTED = frozenset({"rejected", "failed", "crashed"})
Place = tuple[str, str, int]
"""Domain, operator, and the operator set version that introduced this version of it."""


def build_table(
    measured: Measurements,
    *,
    provider: ProviderFacts,
    versions: Versions,
    scope: str,
    created: str,
    partita_version: str,
    budget_seconds: float,
    notes: Sequence[str] = (),
) -> SupportTable:
    """The table; operators in alphabetical order, ai.onnx first."""
    places: dict[Place, list[Measurement]] = {}
    for answer in measured.results:
        places.setdefault((answer.domain, answer.operator, answer.since), []).append(answer)
    beyond = dict(measured.untested_counts)
    operators: dict[tuple[str, str], list[VersionEntry]] = {}
    for place in sorted(places):
        operators.setdefault(place[:2], []).append(_version_entry(places[place], beyond.get(place, 0)))
    counted = Counter[str](answer.outcome for answer in measured.results)
    return SupportTable(
        created=created,
        partita_version=partita_version,
        provider=provider,
        versions=versions,
        scope=scope,
        seconds=measured.seconds,
        budget_seconds=budget_seconds,
        complete=measured.complete,
        sessions=measured.sessions,
        crashes=measured.crashes,
        variants=Counts(**{name: counted.get(name, 0) for name in Counts.model_fields}),
        operators=tuple(
            OperatorEntry(domain=domain, name=name, versions=tuple(entries))
            for (domain, name), entries in operators.items()
        ),
        model_operators=tuple(_model_need(need, places) for need in measured.model_nodes),
        without_example=measured.without_example,
        notes=tuple(notes),
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
    return VersionEntry(
        since=answers[0].since,
        until=answers[0].until,
        verdict=found_verdict,
        types=_assignments([answer for answer in answers if answer.kind == "types"], beyond),
        forms=tuple(
            FormEntry(
                kind=answer.kind,
                outcome=answer.outcome,
                difference=answer.difference,
                factors=tuple(sorted(answer.factors)),
                message=answer.message,
            )
            for answer in forms
        ),
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
    found: dict[Outcome, list[tuple[str, ...]]] = {}
    for answer in answers:
        found.setdefault(answer.outcome, []).append(_row_of(answer, variables))
    replaced = tuple(_row_of(answer, variables) for answer in answers if answer.replaced)
    return Assignments(
        variables=variables,
        replaced=replaced,
        beyond_limit=beyond,
        **{outcome: tuple(listed) for outcome, listed in found.items()},
    )


def _row_of(answer: Measurement, variables: Sequence[str]) -> tuple[str, ...]:
    """The types of one variant, in the order of `variables`."""
    given = dict(answer.types)
    return tuple(short(given[name]) if name in given else "" for name in variables)


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


def _model_need(need: ModelNodes, places: Mapping[Place, Sequence[Measurement]]) -> ModelNeed:
    """Nodes of the model with their outcome."""
    outcomes = list(_outcomes_of(need, places.get((need.domain, need.operator, need.since), ())))
    best: tuple[Outcome, ...] = ("supported", "rejected", "failed", "crashed", "invalid")
    return ModelNeed(
        domain=need.domain,
        operator=need.operator,
        since=need.since,
        types={name: short(kind) for name, kind in need.types},
        nodes=need.nodes,
        outcome=next((outcome for outcome in best if outcome in outcomes), "untested"),
    )


def _outcomes_of(need: ModelNodes, answers: Iterable[Measurement]) -> Iterator[Outcome]:
    """Outcomes of variants that match the known types of the model."""
    for answer in answers:
        given = dict(answer.types)
        if answer.kind == "types" and all(given.get(name, kind) == kind for name, kind in need.types):
            yield answer.outcome


# --- factors that decide ---


def deciding_factors(
    supported: Sequence[frozenset[str]], unsupported: Sequence[frozenset[str]]
) -> tuple[tuple[Condition, ...], int]:
    """A small set of factors that no supported form has, and the number of unsupported forms that it leaves.

    Without any supported form, no factors are returned.
    """
    if not supported:
        return (), 0
    harmless = frozenset().union(*supported)
    open_forms = set(range(len(unsupported)))
    found: list[Condition] = []
    while True:
        forms_of: dict[str, set[int]] = {}
        for number in sorted(open_forms):
            for factor in sorted(unsupported[number] - harmless):
                forms_of.setdefault(factor, set()).add(number)
        groups: dict[frozenset[int], list[str]] = {}  # factors of exactly the same forms are not separable
        for factor, forms in forms_of.items():
            groups.setdefault(frozenset(forms), []).append(factor)
        if not groups:
            return tuple(found), len(open_forms)
        covered = max(groups, key=lambda forms: (len(forms), [-number for number in sorted(forms)]))
        found.append(Condition(factors=tuple(sorted(groups[covered])), forms=len(covered)))
        open_forms -= covered
