"""Norms of the heads before attention are one node each; norms of anything else stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.passes.head_norms import PASS
from partita.export.passes.manager import run as run_passes
from tests.export.nets import Array, Net, context, operators, random, run

HEADS, KV_HEADS, WIDTH = 4, 2, 16
FEED: dict[str, Array] = {
    "q": random(1, 3, HEADS * WIDTH),
    "k": random(1, 3, KV_HEADS * WIDTH, seed=1),
    "last": np.array([2], np.int32),
    "total": np.array(3, np.int32),
    "pk": np.zeros((1, KV_HEADS, 8, WIDTH), np.float32),
    "pv": np.zeros((1, KV_HEADS, 8, WIDTH), np.float32),
}


def net(*, split: int = WIDTH, read: bool = False) -> Net:
    """Attention over queries and keys whose heads are normed; `split`: what the norm takes for the size of a head."""
    made = Net()
    three = []
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        x = made.input(name, [1, "s", heads * WIDTH])
        apart = made.op("Reshape", x, made.constant([1, -1, heads * WIDTH // split, split], np.int64))
        scale = made.constant(random(split, seed=heads))
        normed = made.op("SimplifiedLayerNormalization", apart, scale, axis=-1, epsilon=1e-6, stash_type=1)
        if read:
            made.give(normed, f"normed {name}")
        whole = made.op("Reshape", normed, made.constant([1, -1, heads * WIDTH], np.int64))
        apart.shape = normed.shape = ir.Shape([1, "s", heads * WIDTH // split, split])
        whole.shape = x.shape
        for value in (apart, normed, whole):
            value.type = x.type
        three.append(whole)
    cache = [made.input(name, [1, KV_HEADS, 8, WIDTH]) for name in ("pk", "pv")]
    cursors = [made.input("last", [1], ir.DataType.INT32), made.input("total", [], ir.DataType.INT32)]
    heads_of: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    inputs = (*three, made.inputs[1], *cache, *cursors)
    output, *_ = made.op("com.microsoft::GroupQueryAttention", *inputs, outputs=3, **heads_of)
    made.give(output)
    return made


@pytest.mark.parametrize("split", [WIDTH, 8])
def test_head_norms(tmp_path: Path, split: int) -> None:
    (before,) = run(net(split=split).model(), tmp_path, FEED)
    model = net(split=split).model()
    assert run_passes(model, [PASS], context("contrib")) == {"head_norms": 2}
    assert operators(model) == ["BranchwiseRMSNorm", "BranchwiseRMSNorm", "GroupQueryAttention"]
    np.testing.assert_allclose(run(model, tmp_path, FEED)[0], before, rtol=1e-5, atol=1e-5)


def test_a_norm_that_others_read_stays() -> None:
    model = net(read=True).model()
    assert run_passes(model, [PASS], context("contrib")) == {"head_norms": 0}


def test_only_where_the_target_takes_it() -> None:
    for told in (context("contrib", refused={"BranchwiseRMSNorm"}), context("standard"), context("none")):
        model = net().model()
        assert run_passes(model, [PASS], told) == {"head_norms": 0}
        assert "SimplifiedLayerNormalization" in operators(model)
