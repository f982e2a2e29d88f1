"""Norms of the heads before attention are one node each; norms of anything else stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.passes.head_norms import PASS
from partita.export.passes.manager import run as run_passes
from tests.export.nets import Array, Net, attention, attention_feed, context, operators, random, run

HEADS, KV_HEADS, WIDTH = 4, 2, 16
FEED: dict[str, Array] = {
    "q": random(1, 3, HEADS * WIDTH),
    "k": random(1, 3, KV_HEADS * WIDTH, seed=1),
    **attention_feed(KV_HEADS, WIDTH, 0, 3),
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
    attention(made, (*three, made.inputs[1]), HEADS, KV_HEADS, WIDTH)
    return made


@pytest.mark.parametrize("split", [WIDTH, 8])
def test_head_norms(tmp_path: Path, split: int) -> None:
    before, *_ = run(net(split=split).model(), tmp_path, FEED)
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
