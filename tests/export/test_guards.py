"""What a trace takes for granted of the number of tokens is found, also where torch lets it pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from partita.export.trace.tracing import RecordedGuards, broken_guard


class Planted(torch.nn.Module):
    """Computes something else for some sizes."""

    def __init__(self, odd: Callable[[Any], Any]) -> None:
        super().__init__()
        self.odd, self.recorded_guards = odd, RecordedGuards()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size: Any = x.shape[1]
        self.recorded_guards.shapes.append(size.node.shape_env)
        return x * 2 if self.odd(size) else x


def exported(odd: Callable[[Any], Any]) -> RecordedGuards:
    made = Planted(odd)
    torch.export.export(
        made,
        (torch.zeros(1, 3),),
        dynamic_shapes={"x": {1: torch.export.Dim("size", min=1, max=4096)}},
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    assert made.recorded_guards.shapes, "the trace was not symbolic"
    return made.recorded_guards


@pytest.mark.parametrize("odd", [lambda size: size % 64 == 0, lambda size: size % 4 == 3, lambda size: size**2 > 100])
def test_a_branch_that_depends_on_the_size_is_found(odd: Callable[[Any], Any]) -> None:
    assert broken_guard(exported(odd), 4096)


def test_what_holds_for_every_size_is_no_guard() -> None:
    assert broken_guard(exported(lambda size: size * 64 < size), 4096) is None
