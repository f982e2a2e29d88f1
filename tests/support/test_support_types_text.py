"""Text for supported and rejected type assignments."""

from __future__ import annotations

from typing import Any

import pytest

from partita.support.records import Assignments
from partita.support.sections import refused_text, supported_text

ROWS = tuple((a, b) for a in ("float32", "float16") for b in ("int32", "int64"))
ODD, EVEN = (
    tuple(
        (x, y, z) for x in "abcdefgh" for y in "abcdefgh" for z in "abcdefgh" if (ord(x) + ord(y) + ord(z)) % 2 == odd
    )
    for odd in (1, 0)
)


@pytest.mark.parametrize(
    ("variables", "outcomes", "supported", "refused"),
    [
        ("T", {"supported": (("float32",), ("int8",))}, "all: float32, int8", ""),
        ("T", {"rejected": (("float32",), ("int8",))}, "none", "float32, int8"),
        ("T", {"supported": (("float32",),), "untested": (("int8",),)}, "float32", ""),
        (
            "TI",
            {"supported": ROWS, "rejected": (("float64", "int32"), ("float64", "int64"))},
            "T: float32, float16; I: int32, int64",
            "the other 2 combinations",
        ),
        (
            "TU",
            {"supported": (("a", "x"), ("b", "x"), ("b", "y")), "rejected": (("a", "y"),)},
            "T a with U x; T b with U x, y",
            "the other 1 combination",
        ),
        (
            "TU",
            {"supported": (("a", "a"), ("b", "b")), "rejected": (("a", "b"), ("b", "a"))},
            "T = U: a, b",
            "the other 2 combinations",
        ),
        (
            "ABC",
            {"supported": ODD, "rejected": EVEN},
            "256 of 512 combinations of A, B, C",
            "the other 256 combinations",
        ),
        (("T", "tensor(int64)"), {"supported": (("float32", "int64"),)}, "float32", ""),
    ],
)
def test_types_are_described_by_the_shortest_exact_text(
    variables: Any, outcomes: dict[str, Any], supported: str, refused: str
) -> None:
    types = Assignments(variables=tuple(variables), **outcomes)
    assert (supported_text(types), refused_text(types)) == (supported, refused)
