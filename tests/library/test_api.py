"""Numbers of other libraries, in arguments and in records that programs make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import partita
from partita.library.api import public, python_values
from partita.options.fields import check_fields


class Counted:
    """An integer of nobody knows whom."""

    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.array(3), 3),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        (torch.tensor([1, 2]), [1, 2]),
        ([np.int64(1), 2], [1, 2]),
        ((Counted(),), (7,)),
        ({"a": [np.int64(1)]}, {"a": [1]}),
        (range(3), [0, 1, 2]),
        ("3", "3"),
        (int, int),
    ],
)
def test_a_number_is_pythons_own(given: object, own: object) -> None:
    found = python_values(given)
    assert repr(found) == repr(own) and type(found) is type(own)


@public
def counted(count: int, ids: list[int] | None = None) -> tuple[int, list[int] | None]:
    """What it was given."""
    return count, ids


def test_arguments_take_integers_of_any_library():
    call: Any = counted  # its annotations name Python's numbers alone
    assert call(Counted(), ids=[np.int64(5)]) == (7, [5])
    assert call(np.int8(1), ids=np.array([5, 6])) == (1, [5, 6])


def test_a_sampling_takes_numbers_of_any_library_and_no_truth_values():
    make: Any = partita.Sampling
    given = make(np.float32(0.5), np.int64(4), seed=np.int64(1), max_new_tokens=Counted())
    assert given == partita.Sampling(0.5, 4, seed=1, max_new_tokens=7)
    assert all(type(value).__module__ == "builtins" for value in given.figures().values())
    check_fields(given)
    for name in ("seed", "top_k", "max_new_tokens", "temperature"):
        for wrong in (True, np.bool_(True), "1"):
            with pytest.raises(partita.UsageError, match=f"`{name}` is "):
                check_fields(make(**{name: wrong}))
    with pytest.raises(partita.UsageError, match="`seed` is 1.5; it must be an integer"):
        check_fields(make(seed=np.float64(1.5)))
