"""Types in words, which say no more and no less than the assignments."""

from __future__ import annotations

from partita.support.records import Assignments
from partita.support.sections import refused_text, supported_text


def test_all_of_them():
    types = Assignments(variables=("T",), supported=(("float32",), ("int8",)))
    assert (supported_text(types), refused_text(types)) == ("all: float32, int8", "")


def test_none_of_them():
    types = Assignments(variables=("T",), rejected=(("float32",), ("int8",)))
    assert (supported_text(types), refused_text(types)) == ("none", "float32, int8")


def test_untried_types_keep_it_from_being_all():
    types = Assignments(variables=("T",), supported=(("float32",),), untested=(("int8",),))
    assert supported_text(types) == "float32"


def test_a_product_is_said_by_variable():
    rows = tuple((a, b) for a in ("float32", "float16") for b in ("int32", "int64"))
    types = Assignments(variables=("T", "I"), supported=rows, rejected=(("float64", "int32"), ("float64", "int64")))
    assert supported_text(types) == "T: float32, float16; I: int32, int64"
    assert refused_text(types) == "the other 2 combinations"


def test_what_is_no_product_is_said_with_what_goes_together():
    types = Assignments(variables=("T1", "T2"), supported=(("a", "x"), ("b", "x"), ("b", "y")), rejected=(("a", "y"),))
    assert supported_text(types) == "T1 a with T2 x; T1 b with T2 x, y"
    assert refused_text(types) == "the other 1 combination"


def test_types_that_have_to_be_the_same():
    types = Assignments(variables=("T", "U"), supported=(("a", "a"), ("b", "b")), rejected=(("a", "b"), ("b", "a")))
    assert supported_text(types) == "T = U: a, b"


def test_many_combinations_are_counted():
    names = "abcdefgh"
    taken = tuple((x, y, z) for x in names for y in names for z in names if (ord(x) + ord(y) + ord(z)) % 2)
    left = tuple((x, y, z) for x in names for y in names for z in names if not (ord(x) + ord(y) + ord(z)) % 2)
    types = Assignments(variables=("A", "B", "C"), supported=taken, rejected=left)
    assert supported_text(types) == f"{len(taken)} of 512 combinations of A, B, C"


def test_the_only_type_that_an_input_may_have_is_not_said():
    types = Assignments(variables=("T", "tensor(int64)"), supported=(("float32", "int64"),))
    assert supported_text(types) == "float32"
