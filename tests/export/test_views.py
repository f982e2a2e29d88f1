"""Chains that only look at a tensor differently become one Reshape or none, and what moves elements stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.export.passes.views import PASS
from tests.export.nets import Net, context, left_alone, operators, random, rewritten

FEED = {"x": random(2, 5, 12)}


def net(*steps: tuple[str, Any]) -> Net:
    """x [2, s, 12], seen through `steps`, and read by something that is no view."""
    made = Net()
    value = made.input("x", [2, "s", 12])
    for operator, how in steps:
        if operator == "Transpose":
            value = made.op(operator, value, perm=how)
        else:
            value = made.op(operator, value, made.constant(how, np.int64))
    made.give(made.op("Neg", value))
    return made


TURN = ("Transpose", [0, 2, 1, 3])
NOTHING_LEFT = [
    (("Reshape", [2, -1, 3, 4]), ("Reshape", [2, -1, 12])),
    (("Reshape", [2, -1, 3, 4]), TURN, TURN, ("Reshape", [2, -1, 12])),
    (("Unsqueeze", [1]), ("Squeeze", [1])),
    (("Reshape", [0, 0, 12]),),
]


@pytest.mark.parametrize("steps", NOTHING_LEFT)
def test_chains_that_come_back(tmp_path: Path, steps: tuple[tuple[str, Any], ...]) -> None:
    assert operators(rewritten(lambda: net(*steps), PASS, tmp_path, FEED, context("none"))) == ["Neg"]


ONE_LEFT = [
    (("Reshape", [2, -1, 3, 4]), ("Reshape", [2, -1, 6, 2])),
    (("Reshape", [2, -1, 12, 1]), ("Transpose", [0, 1, 3, 2]), ("Reshape", [2, -1, 2, 6])),
    (("Unsqueeze", [0]), ("Unsqueeze", [4])),
]


@pytest.mark.parametrize("steps", ONE_LEFT)
def test_chains_become_one_reshape(tmp_path: Path, steps: tuple[tuple[str, Any], ...]) -> None:
    assert operators(rewritten(lambda: net(*steps), PASS, tmp_path, FEED, context("none"))) == ["Reshape", "Neg"]


STAYS = [
    (("Reshape", [2, -1, 3, 4]),),
    (("Transpose", [0, 2, 1]),),
    (("Reshape", [2, -1, 3, 4]), TURN, ("Reshape", [2, -1, 12])),
    # The same order for one token, and another for more.
    (("Reshape", [2, 3, -1, 4]), TURN, ("Reshape", [2, -1, 12])),
    (TURN[0:1] + ([1, 0, 2],), ("Reshape", [2, -1, 12])),
]


@pytest.mark.parametrize("steps", STAYS)
def test_what_moves_elements_stays(steps: tuple[tuple[str, Any], ...]) -> None:
    left_alone(lambda: net(*steps), PASS, context("none"))


def test_a_view_that_is_read_in_the_middle_stays(tmp_path: Path) -> None:
    def make() -> Net:
        made = Net()
        split = made.op("Reshape", made.input("x", [2, "s", 12]), made.constant([2, -1, 3, 4], np.int64))
        made.give(made.op("Neg", split), "middle")
        made.give(made.op("Abs", made.op("Reshape", split, made.constant([2, -1, 12], np.int64))))
        return made

    assert operators(rewritten(make, PASS, tmp_path, FEED, context("none"))) == ["Reshape", "Neg", "Abs"]
