"""Fusion of norms, of sums before norms and of per-head norms into one operator; similar patterns are not fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.checkpoint.description import Checkpoint, open_checkpoint
from partita.export.passes import fused_norms, head_norms, skip_norms
from partita.export.weights.sources import checkpoint_weight
from tests.conftest import TinyCheckpoint
from tests.export.nets import (
    Array,
    Net,
    attention,
    attention_feed,
    context,
    left_alone,
    operators,
    random,
    rewritten,
    run,
    run_passes,
)

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
def test_rms_norm_is_fused(
    checkpoint: Checkpoint, tmp_path: Path, square: str, root: str, scale: str, fused: Any
) -> None:
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

    model = rewritten(make, fused_norms.PASS, tmp_path, FEED, context(fused))
    assert operators(model) == ["SimplifiedLayerNormalization" if fused == "contrib" else "RMSNormalization"]
    (norm,) = [node for node in model.graph if node.op_type != "Identity"]
    assert norm.metadata_props["partita.module"].startswith("module."), "it is still known where it comes from"
    if scale == "w":
        assert set(model.graph.initializers) == {SCALE}, "the weight itself, under its own name"


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("fused", ["contrib", "standard"])
def test_layer_norm_is_fused(checkpoint: Checkpoint, tmp_path: Path, shift: bool, fused: Any) -> None:
    def make() -> Net:
        net = Net(24 if fused == "standard" else 21)
        x = net.input("x", [1, "s", WIDTH])
        y = net.op("Mul", normal(net, x, square="Pow", root="Div", centred=True), weight(net, checkpoint))
        net.give(net.op("Add", y, weight(net, checkpoint, SHIFT)) if shift else y)
        return net

    model = rewritten(make, fused_norms.PASS, tmp_path, FEED, context(fused))
    assert operators(model) == ["LayerNormalization"]


def by_length(net: Net, x: ir.Value, form: str, epsilon: float) -> ir.Value:
    """x over its length, in several ways to write it."""
    axes = net.constant([-1], np.int64)
    if form in ("ReduceL2, Clip", "ReduceL2, Max", "scale over the length"):
        length = net.op("ReduceL2", x, axes, keepdims=1)
        floor = net.constant(epsilon)
        length = net.op("Max", length, floor) if form == "ReduceL2, Max" else net.op("Clip", length, floor)
        if form == "scale over the length":
            return net.op("Mul", x, net.op("Div", net.constant(8.0), length))
        wide = net.op("Expand", length, net.constant([1, 1, WIDTH], np.int64)) if "Clip" in form else length
        return net.op("Div", x, wide)
    total = net.op("Add", net.op("ReduceSum", net.op("Mul", x, x), axes, keepdims=1), net.constant(epsilon))
    if form == "ReduceSum, Reciprocal":
        return net.op("Mul", x, net.op("Reciprocal", net.op("Sqrt", total)))
    return net.op("Div", x, net.op("Sqrt", total))


SUMS = ("ReduceSum, Reciprocal", "ReduceSum, Div")
FLOORS = ("ReduceL2, Clip", "ReduceL2, Max", "scale over the length")
WITH_ZEROS = {"x": np.concatenate([FEED["x"], np.zeros((1, 1, WIDTH), np.float32)], 1)}
"""The first rows, and one of zeros: it stays zeros."""


@pytest.mark.parametrize("form", [*SUMS, *FLOORS])
@pytest.mark.parametrize("fused", ["contrib", "standard"])
def test_l2_normalisation_is_fused_into_rms_norm(tmp_path: Path, form: str, fused: Any) -> None:
    epsilon = 1e-6 if form in SUMS else 1e-12

    def make() -> Net:
        net = Net(24 if fused == "standard" else 21)
        net.give(by_length(net, net.input("x", [1, "s", WIDTH]), form, epsilon))
        return net

    model = rewritten(make, fused_norms.PASS, tmp_path, WITH_ZEROS, context(fused))
    assert operators(model) == ["SimplifiedLayerNormalization" if fused == "contrib" else "RMSNormalization"]
    (norm,) = [node for node in model.graph if node.op_type != "Identity"]
    expected = epsilon / WIDTH if form in SUMS else epsilon**2 / WIDTH
    assert norm.attributes.get_float("epsilon", 1.0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-12])
def test_fused_norm_keeps_epsilon(tmp_path: Path, epsilon: float) -> None:
    """Rows near zero, where epsilon decides the result, distinguish it from that of a sum or a floor."""

    def make() -> Net:
        net = Net()
        net.give(normal(net, net.input("x", [1, "s", WIDTH]), square="Mul", root="Div", epsilon=epsilon))
        return net

    model = rewritten(make, fused_norms.PASS, tmp_path, WITH_ZEROS, context("contrib"))
    (norm,) = [node for node in model.graph if node.op_type != "Identity"]
    assert norm.attributes.get_float("epsilon", 1.0) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("form", FLOORS)
def test_l2_normalisation_with_large_floor_is_not_fused(form: str) -> None:
    """An epsilon differs from a floor: rows with a norm near a floor of 1e-3 have other results."""

    def make() -> Net:
        net = Net()
        net.give(by_length(net, net.input("x", [1, "s", WIDTH]), form, 1e-3))
        return net

    left_alone(make, fused_norms.PASS, context("contrib"))


@pytest.mark.parametrize("centred", [False, True])
def test_per_head_scale_becomes_mul_after_fused_norm(checkpoint: Checkpoint, tmp_path: Path, centred: bool) -> None:
    def make() -> Net:
        net = Net()
        x = net.input("x", [1, "s", 4, 16])
        part = checkpoint_weight(checkpoint, SCALE, ir.DataType.FLOAT).reshaped((4, 16))
        net.give(net.op("Mul", net.weight(part), normal(net, x, square="Pow", root="Reciprocal", centred=centred)))
        return net

    model = rewritten(make, fused_norms.PASS, tmp_path, {"x": random(1, 5, 4, 16)}, context("contrib"))
    assert operators(model) == ["LayerNormalization" if centred else "SimplifiedLayerNormalization", "Mul"]


def test_float32_norm_inside_float16_graph_is_fused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    half = ir.DataType.FLOAT16

    def make() -> Net:
        net = Net()
        wide = net.op("Cast", net.input("x", [1, "s", WIDTH], half), to=ir.DataType.FLOAT)
        inner = net.op("Cast", normal(net, wide, square="Pow", root="Reciprocal"), to=half)
        net.give(net.op("Mul", weight(net, checkpoint, dtype=half), inner), dtype=half)
        return net

    feed = {"x": FEED["x"].astype(np.float16)}
    assert operators(rewritten(make, fused_norms.PASS, tmp_path, feed, context("contrib"), 2e-3)) == [
        "SimplifiedLayerNormalization"
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
def test_similar_patterns_are_not_fused_into_norm(kind: str) -> None:
    left_alone(lambda: other(kind), fused_norms.PASS, context("contrib"))


def test_scale_of_unsupported_shape_remains_mul(checkpoint: Checkpoint) -> None:
    """The scale has shape [1, 64]; the operators take [64]."""

    def make() -> Net:
        net = Net()
        y = normal(net, net.input("x", [1, "s", WIDTH]), square="Pow", root="Div")
        part = checkpoint_weight(checkpoint, SCALE, ir.DataType.FLOAT).reshaped((1, WIDTH))
        net.give(net.op("Mul", y, net.weight(part)))
        return net

    model = make().model()
    run_passes(model, [fused_norms.PASS], context("contrib"))
    assert operators(model) == ["SimplifiedLayerNormalization", "Mul"], "the norm without it is one"


TERM_WIDTH = 32
TERMS = {"a": random(1, 4, TERM_WIDTH), "b": random(1, 4, TERM_WIDTH, seed=1)}
SIMPLIFIED, CENTRED = "SimplifiedLayerNormalization", "LayerNormalization"


def residual(
    operator: str = SIMPLIFIED, *, sum_read: bool = True, bias: str = "", shift: bool = False, inner: str = "s"
) -> Net:
    made = Net()
    a, b = made.input("a", [1, "s", TERM_WIDTH]), made.input("b", [1, "s", TERM_WIDTH])
    if bias:
        terms = (b, made.constant(random(TERM_WIDTH, seed=2)))
        b = made.op("Add", *(terms if bias == "after" else terms[::-1]))
    total = made.op("Add", a, b)
    weights = [
        made.constant(random(TERM_WIDTH, seed=3)),
        *([made.constant(random(TERM_WIDTH, seed=4))] if shift else []),
    ]
    y = made.op(operator, total, *weights, axis=-1, epsilon=1e-5, stash_type=1)
    y.shape, y.type = total.shape, total.type
    if sum_read:
        made.give(total, "sum")
    made.give(y)
    return made


@pytest.mark.parametrize("operator", [SIMPLIFIED, CENTRED])
@pytest.mark.parametrize("sum_read", [True, False])
@pytest.mark.parametrize("bias", ["", "before", "after"])
def test_residual_add_is_fused_into_skip_norm(tmp_path: Path, operator: str, sum_read: bool, bias: str) -> None:
    model = rewritten(
        lambda: residual(operator, sum_read=sum_read, bias=bias), skip_norms.PASS, tmp_path, TERMS, context("contrib")
    )
    assert operators(model) == [f"Skip{operator}"]


def test_skip_layer_norm_keeps_shift_and_bias(tmp_path: Path) -> None:
    def make() -> Net:
        return residual(CENTRED, shift=True, bias="after")

    assert operators(rewritten(make, skip_norms.PASS, tmp_path, TERMS, context("contrib"))) == [
        "SkipLayerNormalization"
    ]


def test_sum_read_by_two_norms_is_computed_once(tmp_path: Path) -> None:
    def make() -> Net:
        made = residual()
        total = made.outputs[0].producer().inputs[0]  # type: ignore[union-attr]
        second = made.op(
            SIMPLIFIED, total, made.constant(random(TERM_WIDTH, seed=9)), axis=-1, epsilon=1e-6, stash_type=1
        )
        made.give(second, "second")
        return made

    model = rewritten(make, skip_norms.PASS, tmp_path, TERMS, context("contrib"))
    assert operators(model) == ["SkipSimplifiedLayerNormalization", SIMPLIFIED]


def test_skip_norm_accepts_weight_computed_after_sum(tmp_path: Path) -> None:
    """As in norms with zero-centred weights, which compute 1 + w."""

    def make() -> Net:
        made = Net()
        total = made.op("Add", made.input("a", [1, "s", TERM_WIDTH]), made.input("b", [1, "s", TERM_WIDTH]))
        weight = made.op("Add", made.constant(random(TERM_WIDTH, seed=3)), made.constant(random(TERM_WIDTH, seed=4)))
        made.give(made.op(SIMPLIFIED, total, weight, axis=-1, epsilon=1e-5, stash_type=1))
        return made

    model = rewritten(make, skip_norms.PASS, tmp_path, TERMS, context("contrib"))
    assert operators(model) == ["Add", "SkipSimplifiedLayerNormalization"]


def test_broadcast_sum_is_not_fused_into_skip_norm() -> None:
    def one_of_both() -> Net:
        made = Net()
        total = made.op("Add", made.input("a", [1, "s", TERM_WIDTH]), made.input("b", [1, 1, TERM_WIDTH]))
        y = made.op(SIMPLIFIED, total, made.constant(random(TERM_WIDTH)), axis=-1, epsilon=1e-5, stash_type=1)
        made.give(y)
        return made

    left_alone(one_of_both, skip_norms.PASS, context("contrib"))


HEADS, KV_HEADS, HEAD = 4, 2, 16
HEADS_FEED: dict[str, Array] = {
    "q": random(1, 3, HEADS * HEAD),
    "k": random(1, 3, KV_HEADS * HEAD, seed=1),
    **attention_feed(KV_HEADS, HEAD, 0, 3),
}


def attended(*, split: int = HEAD, read: bool = False) -> Net:
    """Attention over queries and keys whose heads are normed; `split`: what the norm takes for the size of a head."""
    made = Net()
    three = []
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        x = made.input(name, [1, "s", heads * HEAD])
        apart = made.op("Reshape", x, made.constant([1, -1, heads * HEAD // split, split], np.int64))
        scale = made.constant(random(split, seed=heads))
        normed = made.op("SimplifiedLayerNormalization", apart, scale, axis=-1, epsilon=1e-6, stash_type=1)
        if read:
            made.give(normed, f"normed {name}")
        whole = made.op("Reshape", normed, made.constant([1, -1, heads * HEAD], np.int64))
        apart.shape = normed.shape = ir.Shape([1, "s", heads * HEAD // split, split])
        whole.shape = x.shape
        for value in (apart, normed, whole):
            value.type = x.type
        three.append(whole)
    attention(made, (*three, made.inputs[1]), HEADS, KV_HEADS, HEAD)
    return made


@pytest.mark.parametrize("split", [HEAD, 8])
def test_head_norms_move_behind_split_and_match(tmp_path: Path, split: int) -> None:
    before, *_ = run(attended(split=split).model(), tmp_path, HEADS_FEED)
    model = attended(split=split).model()
    assert run_passes(model, [head_norms.PASS], context("contrib")) == {"head_norms": 2}
    assert operators(model) == ["BranchwiseRMSNorm", "BranchwiseRMSNorm", "GroupQueryAttention"]
    np.testing.assert_allclose(run(model, tmp_path, HEADS_FEED)[0], before, rtol=1e-5, atol=1e-5)


def test_head_norm_with_another_reader_is_not_moved() -> None:
    model = attended(read=True).model()
    assert run_passes(model, [head_norms.PASS], context("contrib")) == {"head_norms": 0}


def root_mean_square() -> Net:
    net = Net()
    net.give(normal(net, net.input("x", [1, "s", WIDTH]), square="Pow", root="Div"))
    return net


@pytest.mark.parametrize(
    ("tested", "make", "operator"),
    [
        (fused_norms.PASS, root_mean_square, "SimplifiedLayerNormalization"),
        (skip_norms.PASS, residual, "SkipSimplifiedLayerNormalization"),
        (head_norms.PASS, attended, "BranchwiseRMSNorm"),
    ],
)
def test_norm_fusion_requires_target_support(tested: Any, make: Any, operator: str) -> None:
    asked: list[str] = []
    left_alone(make, tested, context("contrib", refused={operator}, asked=asked))
    assert set(asked) == {operator}
    left_alone(make, tested, context("none", asked=asked))
    if tested is not fused_norms.PASS:
        left_alone(make, tested, context("standard", asked=asked))
    assert set(asked) == {operator}
