"""Fusion of norms, and of sums before norms, into one operator; similar patterns are not fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.checkpoint.description import Checkpoint
from partita.export.passes import fused_norms, skip_norms
from partita.export.weights.sources import StoredPart
from tests.export.nets import (
    LATEST,
    Net,
    context,
    float_source,
    left_alone,
    operators,
    random,
    rewritten,
)

WIDTH = 64
SCALE, SHIFT = "model.norm.weight", "model.layers.0.input_layernorm.weight"
"""Two weights of [64], one in the place of a scale and one of a shift."""
FEED = {"x": random(1, 5, WIDTH) * np.array([[[1.0], [10.0], [1e-2], [1e-3], [0.3]]], np.float32)}
WITH_ZEROS = {"x": np.concatenate([FEED["x"], np.zeros((1, 1, WIDTH), np.float32)], 1)}
"""The first rows, and one of zeros: it stays zeros."""


def weight(net: Net, opened: Checkpoint, name: str = SCALE, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return net.weight(StoredPart(float_source(opened, name, dtype)))


def normal(net: Net, x: ir.Value, *, root: str = "Div", centred: bool = False) -> ir.Value:
    """x over the root of its mean square, in several ways to write it."""
    axes = net.constant([-1], np.int64)
    if centred:
        x = net.op("Sub", x, net.op("ReduceMean", x, axes, keepdims=1))
    squares = net.op("Mul", x, x) if root == "power" else net.op("Pow", x, net.constant(2.0))
    mean = net.op("Add", net.op("ReduceMean", squares, axes, keepdims=1), net.constant(1e-5))
    if root == "power":
        return net.op("Mul", x, net.op("Pow", mean, net.constant(-0.5)))
    spread = net.op("Sqrt", mean)
    return net.op("Div", x, spread) if root == "Div" else net.op("Mul", x, net.op("Reciprocal", spread))


def fused_norm(make: Any, folder: Path, fused: Any, operator: str | None = None) -> ir.Node:
    """The only node of a graph after the pass, an RMS norm unless `operator` says another."""
    model = rewritten(make, fused_norms.PASS, folder, WITH_ZEROS, context(fused))
    assert operators(model) == [
        operator or ("SimplifiedLayerNormalization" if fused == "contrib" else "RMSNormalization")
    ]
    return next(node for node in model.graph if node.op_type != "Identity")


@pytest.mark.parametrize("scale", ["none", "w", "1 + w", "w * 3"])
@pytest.mark.parametrize("root", ["Div", "Reciprocal", "power"])
@pytest.mark.parametrize("fused", ["contrib", "standard"])
def test_rms_norm_is_fused(opened: Checkpoint, tmp_path: Path, root: str, scale: str, fused: Any) -> None:
    def make() -> Net:
        net = Net(LATEST[fused])
        y = normal(net, net.input("x", [1, "s", WIDTH]), root=root)
        if scale == "w * 3":
            y = net.op("Mul", y, net.constant(3.0))
        if scale != "none":
            factor = weight(net, opened)
            y = net.op("Mul", y, net.op("Add", net.constant(1.0), factor) if scale == "1 + w" else factor)
        net.give(y)
        return net

    norm = fused_norm(make, tmp_path, fused)
    assert norm.metadata_props["partita.module"].startswith("module."), "it is still known where it comes from"
    assert norm.attributes.get_float("epsilon", 1.0) == pytest.approx(1e-5, rel=1e-6)
    assert scale != "w" or norm.inputs[1].name == SCALE, "the weight itself, under its own name"  # type: ignore[union-attr]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("fused", ["contrib", "standard"])
def test_layer_norm_is_fused(opened: Checkpoint, tmp_path: Path, shift: bool, fused: Any) -> None:
    def make() -> Net:
        net = Net(LATEST[fused])
        x = net.input("x", [1, "s", WIDTH])
        y = net.op("Mul", normal(net, x, centred=True), weight(net, opened))
        net.give(net.op("Add", y, weight(net, opened, SHIFT)) if shift else y)
        return net

    fused_norm(make, tmp_path, fused, "LayerNormalization")


def by_length(net: Net, x: ir.Value, form: str, epsilon: float) -> ir.Value:
    """x over its length, in several ways to write it."""
    axes, floor = net.constant([-1], np.int64), net.constant(epsilon)
    if form == "ReduceSum":
        return net.op("Div", x, net.op("Sqrt", net.op("Add", net.op("ReduceSum", net.op("Mul", x, x), axes), floor)))
    length = net.op("ReduceL2", x, axes, keepdims=1)
    if form == "ReduceL2, Clip":
        return net.op("Div", x, net.op("Expand", net.op("Clip", length, floor), net.constant([1, 1, WIDTH], np.int64)))
    return net.op("Mul", x, net.op("Div", net.constant(8.0), net.op("Max", length, floor)))


FLOORS = ("ReduceL2, Clip", "ReduceL2, Max, scale over the length")


@pytest.mark.parametrize("form", ["ReduceSum", *FLOORS])
@pytest.mark.parametrize("fused", ["contrib", "standard"])
def test_l2_normalisation_is_fused_into_rms_norm(tmp_path: Path, form: str, fused: Any) -> None:
    epsilon = 1e-12 if form in FLOORS else 1e-6

    def make() -> Net:
        net = Net(LATEST[fused])
        net.give(by_length(net, net.input("x", [1, "s", WIDTH]), form, epsilon))
        return net

    found = fused_norm(make, tmp_path, fused).attributes.get_float("epsilon", 1.0)
    assert found == pytest.approx((epsilon**2 if form in FLOORS else epsilon) / WIDTH, rel=1e-6)


@pytest.mark.parametrize(("centred", "shape"), [(False, (4, 16)), (True, (4, 16)), (False, (1, WIDTH))])
def test_scale_of_another_shape_remains_mul(
    opened: Checkpoint, tmp_path: Path, centred: bool, shape: tuple[int, ...]
) -> None:
    """A scale per head, and one with an axis too many."""

    def make() -> Net:
        net = Net()
        x = net.input("x", [1, "s", *shape])
        part = StoredPart(float_source(opened, SCALE)).reshaped(shape)
        net.give(net.op("Mul", net.weight(part), normal(net, x, centred=centred)))
        return net

    model = rewritten(make, fused_norms.PASS, tmp_path, {"x": random(1, 5, *shape)}, context("contrib"))
    assert operators(model) == ["LayerNormalization" if centred else "SimplifiedLayerNormalization", "Mul"]


def test_float32_norm_inside_float16_graph_is_fused(opened: Checkpoint, tmp_path: Path) -> None:
    half = ir.DataType.FLOAT16

    def make() -> Net:
        net = Net()
        wide = net.op("Cast", net.input("x", [1, "s", WIDTH], half), to=ir.DataType.FLOAT)
        inner = net.op("Cast", normal(net, wide, root="Reciprocal"), to=half)
        net.give(net.op("Mul", weight(net, opened, dtype=half), inner), dtype=half)
        return net

    feed = {"x": FEED["x"].astype(np.float16)}
    assert operators(rewritten(make, fused_norms.PASS, tmp_path, feed, context("contrib"), 2e-3)) == [
        "SimplifiedLayerNormalization"
    ]


def other(kind: str) -> Net:
    """What looks like a norm and is none. Rows with a norm near a floor of 1e-3 differ from those with an epsilon."""
    net = Net()
    x = net.input("x", [1, "s", WIDTH])
    if kind in FLOORS:
        net.give(by_length(net, x, kind, 1e-3))
        return net
    squares = net.op("Abs", x) if kind == "absolute" else net.op("Mul", x, x)
    mean = net.op("ReduceMean", squares, net.constant([1 if kind == "another axis" else -1], np.int64), keepdims=1)
    spread = mean if kind == "no root" else net.op("Sqrt", mean)
    net.give(net.op("Div", net.input("y", [1, "s", WIDTH]) if kind == "of another" else x, spread))
    return net


@pytest.mark.parametrize("kind", ["another axis", "absolute", "no root", "of another", *FLOORS])
def test_similar_patterns_are_not_fused_into_norm(kind: str) -> None:
    left_alone(lambda: other(kind), fused_norms.PASS, context("contrib"))


TERM_WIDTH = 32
TERMS = {"a": random(1, 4, TERM_WIDTH), "b": random(1, 4, TERM_WIDTH, seed=1)}
SIMPLIFIED, CENTRED = "SimplifiedLayerNormalization", "LayerNormalization"


def residual(
    operator: str = SIMPLIFIED,
    *,
    sum_read: bool = True,
    bias: str = "",
    shift: bool = False,
    rows: int | str = "s",
) -> Net:
    made = Net()
    a, b = made.input("a", [1, "s", TERM_WIDTH]), made.input("b", [1, rows, TERM_WIDTH])
    if bias:
        terms = (b, made.constant(random(TERM_WIDTH, seed=2)))
        b = made.op("Add", *(terms if bias == "after" else terms[::-1]))
    total = made.op("Add", a, b)
    first, second = (made.constant(random(TERM_WIDTH, seed=seed)) for seed in (3, 4))
    weights = [first, *([second] if shift else [])]
    y = made.op(operator, total, *weights, axis=-1, epsilon=1e-5, stash_type=1)
    y.shape, y.type = total.shape, total.type
    if sum_read:
        made.give(total, "sum")
    made.give(y)
    return made


@pytest.mark.parametrize("operator", [SIMPLIFIED, CENTRED])
@pytest.mark.parametrize(("sum_read", "bias"), [(True, ""), (False, "before"), (True, "after")])
@pytest.mark.parametrize("shift", [False, True])
def test_residual_add_is_fused_into_skip_norm(
    tmp_path: Path, operator: str, sum_read: bool, bias: str, shift: bool
) -> None:
    """A shift is of the centred norm only."""
    asked: dict[str, Any] = {"sum_read": sum_read, "bias": bias, "shift": shift and operator == CENTRED}
    model = rewritten(lambda: residual(operator, **asked), skip_norms.PASS, tmp_path, TERMS, context("contrib"))
    assert operators(model) == [f"Skip{operator}"]


def test_broadcast_sum_is_not_fused_into_skip_norm() -> None:
    left_alone(lambda: residual(rows=1), skip_norms.PASS, context("contrib"))


def root_mean_square() -> Net:
    net = Net()
    net.give(normal(net, net.input("x", [1, "s", WIDTH])))
    return net


def test_norm_fusion_requires_target_support() -> None:
    refuses, none = context("contrib", refused={"SimplifiedLayerNormalization"}), context("none")
    for told in (refuses, context("standard", refused={"RMSNormalization"}), none):
        left_alone(root_mean_square, fused_norms.PASS, told)
    for told in (context("contrib", refused={"SkipSimplifiedLayerNormalization"}), context("standard"), none):
        left_alone(residual, skip_norms.PASS, told)
