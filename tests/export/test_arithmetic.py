"""What nodes compute on the way to a pass is what ONNX says of them, or is not known."""

from __future__ import annotations

import numpy as np
import pytest

from partita.export.passes.arithmetic import UnknownError, compute_values
from tests.export.nets import Array, Net

TERMS = ([1.0, 5.0, 3.0, 7.0], [4.0, 2.0, 6.0, 8.0], [9.0, 3.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("operator", "expected"), [("Max", [9.0, 5.0, 6.0, 8.0]), ("Min", [1.0, 2.0, 1.0, 0.0])], ids=["Max", "Min"]
)
def test_the_largest_and_the_smallest_are_of_all_terms(operator: str, expected: list[float]) -> None:
    net = Net()
    given = {net.input(name, [4]): np.array(term) for name, term in zip("abc", TERMS, strict=True)}
    result = net.op(operator, *given)
    assert compute_values(net.nodes, given)[result].tolist() == expected
    assert [array.tolist() for array in given.values()] == list(TERMS), "what was given is as it was"


def parts_of(size: int) -> list[Array]:
    """Numbers from 0 on, in three parts."""
    net = Net()
    parts = net.op("Split", net.input("x", [size]), outputs=3, num_outputs=3)
    found = compute_values(net.nodes, {net.inputs[0]: np.arange(size)})
    return [found[part] for part in parts]


def test_parts_of_unequal_size_are_not_known() -> None:
    assert [part.tolist() for part in parts_of(6)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(UnknownError):
        parts_of(7)
