"""A norm becomes one operator whatever it is written with, and what only looks like one stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.checkpoint import Checkpoint, open_checkpoint
from partita.export.passes.fused_norms import PASS
from partita.export.weight_sources import checkpoint_weight
from tests.conftest import TinyCheckpoint
from tests.export.nets import Net, context, left_alone, operators, random, rewritten

WIDTH = 64
SCALE, SHIFT = "model.norm.weight", "model.layers.0.input_layernorm.weight"
"""Two weights of [64], one in the place of a scale and one of a shift."""
FEED = {"x": random(1, 5, WIDTH) * np.array([[[1.0], [10.0], [1e-2], [1e-3], [0.3]]], np.float32)}


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Checkpoint:
    return open_checkpoint(str(tiny_checkpoint("llama")))


def weight(net: Net, checkpoint: Checkpoint, name: str = SCALE, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return net.weight(checkpoint_weight(checkpoint, name, dtype))


def normal(net: Net, x: ir.Value, *, square: str, root: str, epsilon: float = 1e-5, centred: bool = False) -> ir.Value:
    """x over the root of its mean square, in several ways to write it."""
    axes = net.constant([-1], np.int64)
    if centred:
        x = net.op("Sub", x, net.op("ReduceMean", x, axes, keepdims=1))
    squares = net.op("Pow", x, net.constant(2.0)) if square == "Pow" else net.op("Mul", x, x)
    mean = net.op("Add", net.op("ReduceMean", squares, axes, keepdims=1), net.constant(epsilon))
    if root == "power":
        return net.op("Mul", x, net.op("Pow", mean, net.constant(-0.5)))
    spread = net.op("Sqrt", mean)
    if root == "Div":
        return net.op("Div", x, spread)
    if root == "1/":
        return net.op("Mul", net.op("Div", net.constant(1.0), spread), x)
    return net.op("Mul", x, net.op("Reciprocal", spread))


@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("root", ["Reciprocal", "Div", "1/", "power"])
@pytest.mark.parametrize("scale", ["none", "w", "1 + w", "w * 3"])
@pytest.mark.parametrize("fused", ["contrib", "standard"])
def test_rms_norms(checkpoint: Checkpoint, tmp_path: Path, square: str, root: str, scale: str, fused: Any) -> None:
    def make() -> Net:
        net = Net(24 if fused == "standard" else 21)
        y = normal(net, net.input("x", [1, "s", WIDTH]), square=square, root=root)
        if scale == "w":
            y = net.op("Mul", weight(net, checkpoint), y)
        if scale == "1 + w":
            y = net.op("Mul", y, net.op("Add", net.constant(1.0), weight(net, checkpoint)))
        if scale == "w * 3":
            y = net.op("Mul", net.op("Mul", y, net.constant(3.0)), weight(net, checkpoint))
        net.give(y)
        return net

    model = rewritten(make, PASS, tmp_path, FEED, context(fused))
    assert operators(model) == ["SimplifiedLayerNormalization" if fused == "contrib" else "RMSNormalization"]
    (norm,) = [node for node in model.graph if node.op_type != "Identity"]
    assert norm.metadata_props["partita.module"].startswith("module."), "it is still known where it comes from"
    if scale == "w":
        assert set(model.graph.initializers) == {SCALE}, "the weight itself, under its own name"


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("fused", ["contrib", "standard"])
def test_layer_norms(checkpoint: Checkpoint, tmp_path: Path, shift: bool, fused: Any) -> None:
    def make() -> Net:
        net = Net(24 if fused == "standard" else 21)
        x = net.input("x", [1, "s", WIDTH])
        y = net.op("Mul", normal(net, x, square="Pow", root="Div", centred=True), weight(net, checkpoint))
        net.give(net.op("Add", y, weight(net, checkpoint, SHIFT)) if shift else y)
        return net

    model = rewritten(make, PASS, tmp_path, FEED, context(fused))
    assert operators(model) == ["LayerNormalization"]


def test_float32_inside_of_float16(checkpoint: Checkpoint, tmp_path: Path) -> None:
    half = ir.DataType.FLOAT16

    def make() -> Net:
        net = Net()
        wide = net.op("Cast", net.input("x", [1, "s", WIDTH], half), to=ir.DataType.FLOAT)
        inner = net.op("Cast", normal(net, wide, square="Pow", root="Reciprocal"), to=half)
        net.give(net.op("Mul", weight(net, checkpoint, dtype=half), inner), dtype=half)
        return net

    feed = {"x": FEED["x"].astype(np.float16)}
    assert operators(rewritten(make, PASS, tmp_path, feed, context("contrib"), 2e-3)) == [
        "SimplifiedLayerNormalization"
    ]


def test_the_input_may_be_read_by_others(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def make() -> Net:
        net = Net()
        x = net.input("x", [1, "s", WIDTH])
        y = net.op("Mul", normal(net, x, square="Pow", root="Div"), weight(net, checkpoint))
        net.give(net.op("Add", x, y))
        return net

    assert operators(rewritten(make, PASS, tmp_path, FEED, context("contrib"))) == [
        "SimplifiedLayerNormalization",
        "Add",
    ]


def other(kind: str) -> Net:
    """What looks like a norm and is none."""
    net = Net()
    x = net.input("x", [1, "s", WIDTH])
    squares = net.op("Abs", x) if kind == "absolute" else net.op("Mul", x, x)
    mean = net.op("ReduceMean", squares, net.constant([1 if kind == "another axis" else -1], np.int64), keepdims=1)
    spread = mean if kind == "no root" else net.op("Sqrt", mean)
    net.give(net.op("Div", net.input("y", [1, "s", WIDTH]) if kind == "of another" else x, spread))
    return net


@pytest.mark.parametrize("kind", ["another axis", "absolute", "no root", "of another"])
def test_what_is_no_norm_stays(kind: str) -> None:
    left_alone(lambda: other(kind), PASS, context("contrib"))


def test_nothing_is_written_that_the_target_does_not_take(checkpoint: Checkpoint) -> None:
    def make() -> Net:
        net = Net()
        y = normal(net, net.input("x", [1, "s", WIDTH]), square="Pow", root="Div")
        net.give(net.op("Mul", y, weight(net, checkpoint)))
        return net

    asked: list[str] = []
    left_alone(make, PASS, context("contrib", refused={"SimplifiedLayerNormalization"}, asked=asked))
    assert asked == ["SimplifiedLayerNormalization"]
    left_alone(make, PASS, context("none", asked=asked))
    assert len(asked) == 1, "beside primitives nobody is asked"


def test_a_scale_that_cannot_be_read_stays(checkpoint: Checkpoint) -> None:
    """Of [1, 64], say: the operators take [64]."""

    def make() -> Net:
        net = Net()
        y = normal(net, net.input("x", [1, "s", WIDTH]), square="Pow", root="Div")
        part = checkpoint_weight(checkpoint, SCALE, ir.DataType.FLOAT).reshaped((1, WIDTH))
        net.give(net.op("Mul", y, net.weight(part)))
        return net

    model = make().model()
    PASS.run(model, context("contrib"))
    assert operators(model) == ["SimplifiedLayerNormalization", "Mul"], "the norm without it is one"
