"""Which factors tell forms that are not taken from those that are."""

from __future__ import annotations

from partita.support.deciding import Deciding, deciding


def forms(*texts: str) -> list[frozenset[str]]:
    return [frozenset(text.split(", ")) for text in texts]


def test_the_factor_that_all_of_them_have_and_no_taken_form_has():
    found, rest = deciding(
        forms("mode=linear, rank 4", "mode=nearest, rank 3"), forms("mode=cubic, rank 4", "mode=cubic, rank 3")
    )
    assert found == (Deciding(("mode=cubic",), 2),)
    assert rest == 0


def test_factors_that_were_never_apart_are_all_named():
    found, _ = deciding(forms("mode=linear"), forms("mode=cubic, with roi"))
    assert found == (Deciding(("mode=cubic", "with roi"), 1),)


def test_two_causes_are_two_conditions():
    found, rest = deciding(forms("a=1, b=1"), forms("a=2, b=1", "a=1, b=2", "a=2, b=2"))
    assert {condition.factors for condition in found} == {("a=2",), ("b=2",)}
    assert rest == 0


def test_a_form_whose_factors_are_all_taken_elsewhere_is_left_unexplained():
    found, rest = deciding(forms("a=1, b=2", "a=2, b=1"), forms("a=1, b=1"))
    assert (found, rest) == ((), 1)


def test_nothing_is_concluded_where_nothing_is_taken():
    assert deciding([], forms("a=1", "a=2")) == ((), 0)
