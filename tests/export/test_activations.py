"""A SiLU of any slope becomes one operator; other nodes are unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.export.passes.activations import PASS
from partita.export.passes.arithmetic import UnknownError, compute_values
from tests.export.nets import Net, context, left_alone, operators, random, rewritten, run_passes

FEED = {"x": 4 * random(1, 7, 16), "up": random(1, 7, 16, seed=1)}


def net(form: str, opset: int = 21) -> Net:
    """x times a curve of x in several forms, the last of which are no SiLU, times `up`."""
    made = Net(opset)
    x, up = made.input("x", [1, "s", 16]), made.input("up", [1, "s", 16])
    inner = {
        "slope": lambda: made.op("Mul", made.constant(1.702), x),
        "slope per column": lambda: made.op("Mul", x, made.constant(np.linspace(1, 2, 16))),
        "curve of another": lambda: up,
    }.get(form, lambda: x)()
    curve = made.op("Sigmoid", inner)
    if form == "curve read twice":
        made.give(curve, "curve")
    made.give(made.op("Mul", made.op("Mul", *((curve, x) if form == "slope" else (x, curve))), up))
    return made


@pytest.mark.parametrize("form", ["plain", "slope"])
def test_silu_becomes_one_operator(tmp_path: Path, form: str) -> None:
    model = rewritten(lambda: net(form), PASS, tmp_path, FEED, context("contrib"))
    assert operators(model) == ["QuickGelu", "Mul"]
    model = net(form, 24).model()
    assert run_passes(model, [PASS], context("standard")) == {"activations": 1}
    assert operators(model) == ["Swish", "Mul"]


@pytest.mark.parametrize("form", ["slope per column", "curve of another", "curve read twice"])
def test_similar_functions_are_not_fused(form: str) -> None:
    left_alone(lambda: net(form), PASS, context("contrib"))


def test_activations_are_unchanged_if_target_lacks_the_operator() -> None:
    told: list[Any] = [context("contrib", refused={"QuickGelu"}), context("standard", refused={"Swish"})]
    for each in (*told, context("none")):
        left_alone(lambda: net("slope"), PASS, each)


def test_unsupported_operator_raises_unknown_error() -> None:
    made = Net()
    source = made.input("x", [4])
    made.op("Softmax", source)
    with pytest.raises(UnknownError, match="Softmax"):
        compute_values(made.nodes, {source: np.zeros(4)})
