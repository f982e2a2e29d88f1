"""Text for supported and rejected type assignments."""

from __future__ import annotations

from partita.support.records import Assignments
from partita.support.sections import refused_text, supported_text


def test_all_types_supported_text_lists_all():
    types = Assignments(variables=("T",), supported=(("float32",), ("int8",)))
    assert (supported_text(types), refused_text(types)) == ("all: float32, int8", "")


def test_no_types_supported_text_is_none():
    types = Assignments(variables=("T",), rejected=(("float32",), ("int8",)))
    assert (supported_text(types), refused_text(types)) == ("none", "float32, int8")


def test_untested_types_omit_the_all_prefix():
    types = Assignments(variables=("T",), supported=(("float32",),), untested=(("int8",),))
    assert supported_text(types) == "float32"


def test_product_of_types_is_listed_per_variable():
    rows = tuple((a, b) for a in ("float32", "float16") for b in ("int32", "int64"))
    types = Assignments(variables=("T", "I"), supported=rows, rejected=(("float64", "int32"), ("float64", "int64")))
    assert supported_text(types) == "T: float32, float16; I: int32, int64"
    assert refused_text(types) == "the other 2 combinations"


def test_non_product_types_are_listed_as_combinations():
    types = Assignments(variables=("T1", "T2"), supported=(("a", "x"), ("b", "x"), ("b", "y")), rejected=(("a", "y"),))
    assert supported_text(types) == "T1 a with T2 x; T1 b with T2 x, y"
    assert refused_text(types) == "the other 1 combination"


def test_equal_type_variables_are_listed_as_equation():
    types = Assignments(variables=("T", "U"), supported=(("a", "a"), ("b", "b")), rejected=(("a", "b"), ("b", "a")))
    assert supported_text(types) == "T = U: a, b"


def test_many_combinations_are_counted():
    names = "abcdefgh"
    taken = tuple((x, y, z) for x in names for y in names for z in names if (ord(x) + ord(y) + ord(z)) % 2)
    left = tuple((x, y, z) for x in names for y in names for z in names if not (ord(x) + ord(y) + ord(z)) % 2)
    types = Assignments(variables=("A", "B", "C"), supported=taken, rejected=left)
    assert supported_text(types) == f"{len(taken)} of 512 combinations of A, B, C"


def test_fixed_input_types_are_omitted():
    types = Assignments(variables=("T", "tensor(int64)"), supported=(("float32", "int64"),))
    assert supported_text(types) == "float32"
