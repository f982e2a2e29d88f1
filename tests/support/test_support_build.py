"""The support table built from probe results: outcomes, types by outcome, operators of a model."""

from __future__ import annotations

import pytest

from partita.support.build import deciding_factors, support_level
from partita.support.records import Condition, ModelNeed
from tests.support.tables import answer, form, table

FLOAT, HALF, WHOLE = "T=tensor(float)", "T=tensor(float16)", "T=tensor(int64)"


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["supported", "invalid"], "supported"),
        (["supported", "rejected"], "partly"),
        (["supported", "failed"], "partly"),
        (["rejected", "invalid", "untested"], "rejected"),
        (["crashed"], "rejected"),
        (["invalid"], "invalid"),
        (["invalid", "untested"], "untested"),
    ],
)
def test_invalid_outcomes_do_not_affect_support_level(outcomes, expected):
    assert support_level(answer("Cast", outcome, FLOAT) for outcome in outcomes) == expected


def test_types_are_grouped_by_outcome_and_forms_are_separate():
    made = table(
        answer("Cast", "supported", FLOAT),
        answer("Cast", "rejected", HALF, message="no kernel"),
        answer("Cast", "invalid", WHOLE),
        form("Cast", "supported", "mode=a"),
        form("Cast", "rejected", "mode=b", message="no kernel"),
        untested_counts=((("", "Cast", 13), 7),),
    )
    (entry,) = made.operators
    (version,) = entry.versions
    assert version.types.supported == (("float32",),)
    assert version.types.rejected == (("float16",),)
    assert version.types.invalid == (("int64",),)
    assert version.types.beyond_limit == 7
    assert [condition.factors for condition in version.conditions] == [("mode=b",)]
    assert [(said.text, said.variants) for said in version.messages] == [("no kernel", 2)]
    assert [made.variants[each] for each in ("supported", "rejected", "invalid")] == [2, 2, 1]


def test_rejected_type_explains_form_before_attributes():
    half = answer("Cast", "rejected", "T=tensor(float16)", kind="form", factors=frozenset({"saturate=0"}))
    plain = form("Cast", "supported", "saturate by default")
    told = table(answer("Cast", "rejected", HALF), plain, half).operators[0].newest
    assert (told.conditions, told.unexplained) == ((), 0)
    untold = table(plain, half).operators[0].newest
    assert [condition.factors for condition in untold.conditions] == [("T float16", "saturate=0")]


def test_absent_optional_input_has_empty_type():
    made = table(answer("Clip", "supported", FLOAT, "T2=tensor(float)"), answer("Clip", "supported", FLOAT))
    assert made.operators[0].newest.types.supported == (("float32", "float32"), ("float32", ""))


def test_operator_versions_are_sorted_with_newest_last():
    made = table(answer("Cast", "supported", FLOAT, since=13), answer("Cast", "rejected", FLOAT, since=9, until=12))
    assert [version.since for version in made.operators[0].versions] == [9, 13]
    assert made.operators[0].newest.since == 13


@pytest.mark.parametrize(
    ("kind", "expected"), [(FLOAT, "supported"), (HALF, "rejected"), ("T=tensor(bool)", "untested")]
)
def test_model_operators_get_outcome_of_their_types(kind, expected):
    name, _, text = kind.partition("=")
    made = table(
        answer("Cast", "supported", FLOAT),
        answer("Cast", "rejected", HALF),
        model_nodes=(ModelNeed(domain="", operator="Cast", since=13, types={name: text}, nodes=4),),
    )
    assert [(need.nodes, need.outcome) for need in made.model_operators] == [(4, expected)]


@pytest.mark.parametrize(
    ("taken", "others", "found", "unexplained"),
    [
        (
            ["mode=linear, rank 4", "mode=nearest, rank 3"],
            ["mode=cubic, rank 4", "mode=cubic, rank 3"],
            [(("mode=cubic",), 2)],
            0,
        ),
        (["mode=linear"], ["mode=cubic, with roi"], [(("mode=cubic", "with roi"), 1)], 0),
        (["a=1, b=1"], ["a=2, b=1", "a=1, b=2", "a=2, b=2"], [(("a=2",), 2), (("b=2",), 1)], 0),
        (["a=1, b=2", "a=2, b=1"], ["a=1, b=1"], [], 1),
        ([], ["a=1", "a=2"], [], 0),
    ],
)
def test_deciding_factors_are_smallest_sets_absent_from_supported_forms(taken, others, found, unexplained):
    def forms(texts: list[str]) -> list[frozenset[str]]:
        return [frozenset(text.split(", ")) for text in texts]

    wanted = tuple(Condition(factors=factors, forms=count) for factors, count in found)
    assert deciding_factors(forms(taken), forms(others)) == (wanted, unexplained)
