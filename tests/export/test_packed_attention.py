"""Query, key and value projections are merged into one MatMul; the weights are concatenated while written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.checkpoint.description import Checkpoint
from partita.export.passes.packed_attention import PASS
from partita.export.weights.sources import StoredPart, weight_part
from tests.export.nets import (
    Array,
    Net,
    attention,
    attention_feed,
    context,
    float_source,
    left_alone,
    operators,
    random,
    rewritten,
    run_passes,
)

HIDDEN, HEADS, KV_HEADS, WIDTH = 64, 4, 2, 16
SIZES = {"q": HEADS * WIDTH, "k": KV_HEADS * WIDTH, "v": KV_HEADS * WIDTH}
LAYER = "model.layers.0.self_attn"
FEED: dict[str, Array] = {
    "x": random(1, 3, HIDDEN),
    "y": random(1, 3, HIDDEN, seed=1),
    **attention_feed(KV_HEADS, WIDTH, 0, 3),
}


def attended(net: Net, three: list[Any]) -> Net:
    for value, size in zip(three, SIZES.values(), strict=True):
        value.shape, value.type = ir.Shape([1, "s", size]), ir.TensorType(ir.DataType.FLOAT)
    attention(net, three, HEADS, KV_HEADS, WIDTH)
    return net


def net(opened: Checkpoint, *, bias: str = "qkv", two: bool = False, read: bool = False) -> Net:
    """Three products and attention. `bias`: which have one; `two`: the values are made of another input."""
    made = Net()
    x = made.input("x", [1, "s", HIDDEN])
    y = made.input("y", [1, "s", HIDDEN]) if two else x
    three = []
    for name, size in SIZES.items():
        part = StoredPart(float_source(opened, f"{LAYER}.{name}_proj.weight")).permuted((1, 0))
        assert part is not None
        value = made.op("MatMul", y if name == "v" else x, made.weight(part))
        if name in bias:
            shift = StoredPart(float_source(opened, f"{LAYER}.{name}_proj.bias"))
            value.shape, value.type = ir.Shape([1, "s", size]), ir.TensorType(ir.DataType.FLOAT)
            value = made.op("Add", value, made.weight(shift))
        if read and name == "k":
            made.give(value, "key")
        three.append(value)
    return attended(made, three)


@pytest.mark.parametrize("bias", ["qkv", ""])
def test_qkv_projections_are_merged_into_single_matmul(opened: Checkpoint, tmp_path: Path, bias: str) -> None:
    model = rewritten(lambda: net(opened, bias=bias), PASS, tmp_path, FEED, context("contrib"))
    assert operators(model) == ["MatMul", *(["Add"] if bias else []), "GroupQueryAttention"]
    weight = weight_part(model.graph.initializers[f"{LAYER}.q_proj+k_proj+v_proj.weight"])
    assert weight is not None and list(weight.shape) == [HIDDEN, sum(SIZES.values())]
    assert weight.source.tensors == {f"{LAYER}.{name}_proj.weight" for name in SIZES}, "nothing is read yet"
    assert weight.source.elements == HIDDEN * sum(SIZES.values())


def split_net(*order: int) -> Net:
    """One product that is split into three parts, and attention over them in this order."""
    made = Net()
    whole = made.op("MatMul", made.input("x", [1, "s", HIDDEN]), made.constant(random(HIDDEN, sum(SIZES.values()))))
    sizes = [list(SIZES.values())[each] for each in order]
    parts = made.op("Split", whole, made.constant(sizes, np.int64), axis=-1, outputs=3)
    return attended(made, [parts[order.index(each)] for each in range(3)])


def test_split_of_merged_product_feeds_attention_directly(tmp_path: Path) -> None:
    model = rewritten(lambda: split_net(0, 1, 2), PASS, tmp_path, FEED, context("contrib"))
    assert operators(model) == ["MatMul", "GroupQueryAttention"]


OTHERS: list[dict[str, Any]] = [{"bias": "qv"}, {"two": True}, {"read": True}]
"""One without a bias, values of another input, keys that something else reads."""


def test_unlike_or_unsupported_projections_are_not_packed(opened: Checkpoint) -> None:
    left_alone(lambda: split_net(1, 2, 0), PASS, context("contrib"))
    for options in OTHERS:
        left_alone(lambda options=options: net(opened, **options), PASS, context("contrib"))  # type: ignore[misc]
    takes_three = context("contrib", refuses=lambda node: node.inputs[1] is None)
    for told in (takes_three, context("standard"), context("none")):
        left_alone(lambda: net(opened), PASS, told)


def test_qkv_is_packed_when_target_rejects_all_gqa_forms(opened: Checkpoint) -> None:
    model = net(opened).model()
    assert run_passes(model, [PASS], context("contrib", refused={"GroupQueryAttention"})) == {"packed_attention": 1}
    assert operators(model).count("MatMul") == 1
