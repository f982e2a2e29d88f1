"""Activation fusion: every form becomes one operator; other nodes are unchanged."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.passes.activations import PASS
from partita.export.passes.arithmetic import UnknownError, compute_values
from tests.export.nets import Array, Net, context, left_alone, operators, random, rewritten, run_passes

FEED = {"x": 4 * random(1, 7, 16), "up": random(1, 7, 16, seed=1)}


def activation(net: Net, x: ir.Value, form: str) -> ir.Value:
    """Ways in which models write what they compute."""

    def number(value: float) -> ir.Value:
        return net.constant(value)

    if form == "silu":
        return net.op("Mul", x, net.op("Sigmoid", x))
    if form == "silu by tanh":
        half = net.op("Mul", x, number(0.5))
        return net.op("Mul", half, net.op("Add", net.op("Tanh", half), number(1.0)))
    if form == "quick gelu":
        return net.op("Mul", net.op("Sigmoid", net.op("Mul", number(1.702), x)), x)
    if form == "gelu":
        curve = net.op("Erf", net.op("Div", x, number(2**0.5)))
        return net.op("Mul", net.op("Mul", x, number(0.5)), net.op("Add", number(1.0), curve))
    cube = net.op("Pow", x, number(3.0)) if form == "gelu by tanh" else net.op("Mul", x, net.op("Mul", x, x))
    inner = net.op("Add", x, net.op("Mul", number(0.044715), cube))
    curve = net.op("Tanh", net.op("Mul", number((2 / np.pi) ** 0.5), inner))
    return net.op("Mul", net.op("Mul", number(0.5), x), net.op("Add", number(1.0), curve))


FORMS = {
    "silu": "QuickGelu",
    "silu by tanh": "QuickGelu",
    "quick gelu": "QuickGelu",
    "gelu": "Gelu",
    "gelu by tanh": "Gelu",
    "gelu by products": "Gelu",
}


def net(form: str, opset: int = 21) -> Net:
    made = Net(opset)
    x = made.input("x", [1, "s", 16])
    made.give(made.op("Mul", activation(made, x, form), made.input("up", [1, "s", 16])))
    return made


@pytest.mark.parametrize("form", FORMS)
def test_activation_forms_become_contrib_operators(tmp_path: Path, form: str) -> None:
    model = rewritten(lambda: net(form), PASS, tmp_path, FEED, context("contrib"))
    assert operators(model) == [FORMS[form], "Mul"]


@pytest.mark.parametrize("form", FORMS)
def test_activation_forms_become_standard_operators(form: str) -> None:
    model = net(form, 24).model()
    assert run_passes(model, [PASS], context("standard")) == {"activations": 1}
    assert operators(model) == ["Swish" if FORMS[form] == "QuickGelu" else "Gelu", "Mul"]


def test_gelu_becomes_a_contrib_operator_before_opset_20(tmp_path: Path) -> None:
    told = context("contrib")
    old = replace(told, spec=replace(told.spec, opset=18))
    for form, operator in (("gelu", "Gelu"), ("gelu by tanh", "FastGelu")):
        model = rewritten(functools.partial(net, form, 18), PASS, tmp_path, FEED, old, 1e-4)
        assert operators(model) == [operator, "Mul"]
        assert model.graph[0].domain == "com.microsoft"


def similar(kind: str) -> Net:
    """What is no activation that is known."""
    made = Net()
    x, up = made.input("x", [1, "s", 16]), made.input("up", [1, "s", 16])
    gates: dict[str, Any] = {
        "a gate of another": lambda: made.op("Mul", up, made.op("Sigmoid", x)),
        "another slope": lambda: made.op("Mul", x, made.op("Sigmoid", made.op("Mul", x, made.constant(1.5)))),
        "a curve alone": lambda: made.op("Tanh", x),
        "a factor by column": lambda: made.op(
            "Mul", x, made.op("Sigmoid", made.op("Mul", x, made.constant(np.linspace(1, 2, 16))))
        ),
    }
    made.give(gates[kind]())
    made.give(up, "other")
    return made


@pytest.mark.parametrize("kind", ["a gate of another", "another slope", "a curve alone", "a factor by column"])
def test_similar_functions_are_not_fused(kind: str) -> None:
    left_alone(lambda: similar(kind), PASS, context("contrib"))


def test_activations_are_unchanged_if_target_lacks_the_operator() -> None:
    left_alone(lambda: net("silu"), PASS, context("contrib", refused={"QuickGelu"}))
    left_alone(lambda: net("silu", 24), PASS, context("standard", refused={"Swish"}))
    left_alone(lambda: net("silu"), PASS, context("none"))


# What nodes compute on the way to a pass is what ONNX says of them, or is not known


TERMS = ([1.0, 5.0, 3.0, 7.0], [4.0, 2.0, 6.0, 8.0], [9.0, 3.0, 1.0, 0.0])


def test_the_last_part_may_be_smaller() -> None:
    assert [part.tolist() for part in parts_of(6)] == [[0, 1], [2, 3], [4, 5]]
    assert [part.tolist() for part in parts_of(7)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_unsupported_operator_raises_unknown_error() -> None:
    net = Net()
    source = net.input("x", [4])
    net.op("Softmax", source)
    with pytest.raises(UnknownError, match="Softmax"):
        compute_values(net.nodes, {source: np.zeros(4)})


def parts_of(size: int) -> list[Array]:
    """Numbers from 0 on, in three parts."""
    net = Net()
    parts = net.op("Split", net.input("x", [size]), outputs=3, num_outputs=3)
    found = compute_values(net.nodes, {net.inputs[0]: np.arange(size)})
    return [found[part] for part in parts]


@pytest.mark.parametrize(
    ("operator", "expected"), [("Max", [9.0, 5.0, 6.0, 8.0]), ("Min", [1.0, 2.0, 1.0, 0.0])], ids=["Max", "Min"]
)
def test_max_and_min_are_computed_over_all_inputs(operator: str, expected: list[float]) -> None:
    net = Net()
    given = {net.input(name, [4]): np.array(term) for name, term in zip("abc", TERMS, strict=True)}
    result = net.op(operator, *given)
    assert compute_values(net.nodes, given)[result].tolist() == expected
    assert [array.tolist() for array in given.values()] == list(TERMS), "what was given is as it was"
