"""Query, key and value projections are merged into one MatMul; the weights are concatenated while written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.checkpoint.description import Checkpoint, open_checkpoint
from partita.export.passes.packed_attention import PASS
from partita.export.weights.sources import StoredPart, weight_part
from tests.conftest import TinyCheckpoint
from tests.export.nets import (
    Array,
    Net,
    attention,
    attention_feed,
    context,
    float_source,
    operators,
    random,
    run,
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


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Checkpoint:
    return open_checkpoint(str(tiny_checkpoint("qwen2")))


def attended(net: Net, three: list[Any]) -> Net:
    for value, size in zip(three, SIZES.values(), strict=True):
        value.shape, value.type = ir.Shape([1, "s", size]), ir.TensorType(ir.DataType.FLOAT)
    attention(net, three, HEADS, KV_HEADS, WIDTH)
    return net


def net(checkpoint: Checkpoint, *, bias: str = "qkv", two: bool = False, read: bool = False) -> Net:
    """Three products and attention. `bias`: which have one; `two`: the values are made of another input."""
    made = Net()
    x = made.input("x", [1, "s", HIDDEN])
    y = made.input("y", [1, "s", HIDDEN]) if two else x
    three = []
    for name, size in SIZES.items():
        part = StoredPart(float_source(checkpoint, f"{LAYER}.{name}_proj.weight")).permuted((1, 0))
        assert part is not None
        value = made.op("MatMul", y if name == "v" else x, made.weight(part))
        if name in bias:
            shift = StoredPart(float_source(checkpoint, f"{LAYER}.{name}_proj.bias"))
            value.shape, value.type = ir.Shape([1, "s", size]), ir.TensorType(ir.DataType.FLOAT)
            value = made.op("Add", value, made.weight(shift))
        if read and name == "k":
            made.give(value, "key")
        three.append(value)
    return attended(made, three)


def packed(make: Any, folder: Path, count: int = 1) -> ir.Model:
    before = run(make().model(), folder, FEED)
    model = make().model()
    assert run_passes(model, [PASS], context("contrib")) == {"packed_attention": count}
    for one, other in zip(before, run(model, folder, FEED), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    return model


@pytest.mark.parametrize("bias", ["qkv", ""])
def test_qkv_projections_are_merged_into_single_matmul(checkpoint: Checkpoint, tmp_path: Path, bias: str) -> None:
    model = packed(lambda: net(checkpoint, bias=bias), tmp_path)
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
    assert operators(packed(lambda: split_net(0, 1, 2), tmp_path)) == ["MatMul", "GroupQueryAttention"]


OTHERS: list[dict[str, Any]] = [{"bias": "qv"}, {"two": True}, {"read": True}]
"""One without a bias, values of another input, keys that something else reads."""


def test_unlike_or_unsupported_projections_are_not_packed(checkpoint: Checkpoint) -> None:
    cases = [(split_net(1, 2, 0), context("contrib"))]
    cases += [(net(checkpoint, **options), context("contrib")) for options in OTHERS]
    takes_three = context("contrib", refuses=lambda node: node.inputs[1] is None)
    cases += [(net(checkpoint), told) for told in (takes_three, context("standard"), context("none"))]
    for case, told in cases:
        model = case.model()
        before = operators(model)
        assert run_passes(model, [PASS], told) == {"packed_attention": 0}
        assert operators(model) == before


def test_qkv_is_packed_when_target_rejects_all_gqa_forms(checkpoint: Checkpoint) -> None:
    model = net(checkpoint).model()
    assert run_passes(model, [PASS], context("contrib", refused={"GroupQueryAttention"})) == {"packed_attention": 1}
    assert operators(model).count("MatMul") == 1
