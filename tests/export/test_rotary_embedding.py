"""A rotary embedding becomes one operator where attention does not turn queries and keys itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.passes.manager import run as run_passes
from partita.export.passes.rotary_embedding import PASS
from tests.export.nets import LENGTH, Array, Net, context, operators, random, run
from tests.export.test_rotary_attention import HEADS, KV_HEADS, OTHERS, WIDTH, halves, heads_of, neighbours, tables
from tests.export.test_rotary_attention import feed as gqa_feed
from tests.export.test_rotary_attention import net as gqa_net


def net(form: Any = halves, turned: int = WIDTH, waves: tuple[Array, Array] | None = None, rows: int = 2) -> Net:
    """Queries and keys of a batch, turned, written and attended to in operators of opset 24."""
    made = Net(24)
    positions = made.input("positions", [rows, "s"], ir.DataType.INT32)
    axis = made.constant([1], np.int64)
    cos, sin = (
        made.op("Unsqueeze", made.op("Gather", made.constant(wave), positions, axis=0), axis)
        for wave in waves or tables(turned)
    )
    turned_heads = []
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        x = heads_of(made, made.input(name, [rows, "s", heads * WIDTH]), heads, rows)
        y = form(made, x, cos, sin, turned)
        y.shape, y.type = x.shape, x.type
        turned_heads.append(y)
    query, key = turned_heads
    past = made.input("past", [rows, KV_HEADS, LENGTH, WIDTH])
    keys = made.op("TensorScatter", past, key, made.input("start", [rows], ir.DataType.INT64), axis=2)
    made.give(made.op("Attention", query, keys, past, is_causal=0))
    made.give(keys, "present")
    return made


def feed(rows: int) -> dict[str, Array]:
    start = np.array([3, 9][:rows], np.int64)
    return {
        "positions": (start[:, None] + np.arange(4)).astype(np.int32),
        "start": start,
        "q": random(rows, 4, HEADS * WIDTH),
        "k": random(rows, 4, KV_HEADS * WIDTH, seed=1),
        "past": random(rows, KV_HEADS, LENGTH, WIDTH, seed=2),
    }


FORMS: dict[str, dict[str, Any]] = {
    "all of a head": {},
    "a part of a head": {"turned": 24},
    "neighbours": {"form": neighbours, "waves": tables(WIDTH, repeat="neighbours"), "rows": 1},
    "neighbours in a part of a head": {
        "form": neighbours,
        "turned": 6,
        "waves": tables(6, repeat="neighbours"),
        "rows": 1,
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_rotary_embedding(tmp_path: Path, form: str) -> None:
    rows = FORMS[form].get("rows", 2)
    before = run(net(**FORMS[form]).model(), tmp_path, feed(rows))
    model = net(**FORMS[form]).model()
    assert run_passes(model, [PASS], context("standard")) == {"rotary_embedding": 2}
    for one, other in zip(before, run(model, tmp_path, feed(rows)), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    left = [name for name in operators(model) if name not in ("Reshape", "Transpose")]
    assert left.count("Gather") == 2, "the tables are looked up once for queries and keys"
    assert sorted(left) == sorted(["Gather"] * 2 + ["RotaryEmbedding"] * 2 + ["TensorScatter", "Attention"])


@pytest.mark.parametrize("kind", ["keys are turned otherwise", "a part that the operator does not turn"])
def test_beside_an_attention_that_does_not_turn_them_itself(tmp_path: Path, kind: str) -> None:
    before = run(gqa_net(**OTHERS[kind]).model(), tmp_path, gqa_feed(9, 4))
    model = gqa_net(**OTHERS[kind]).model()
    assert run_passes(model, [PASS], context("contrib")) == {"rotary_embedding": 2}
    for one, other in zip(before, run(model, tmp_path, gqa_feed(9, 4)), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5)
    assert operators(model).count("Cast") == 1, "positions are widened once"
    assert not {"Gather", "Mul", "Neg"} & set(operators(model))


def test_positions_that_are_moved_stay() -> None:
    model = gqa_net(offset=True).model()
    assert run_passes(model, [PASS], context("contrib")) == {"rotary_embedding": 0}


def test_only_where_the_target_takes_it() -> None:
    before = operators(net().model())
    for told in (context("standard", refused={"RotaryEmbedding"}), context("none")):
        model = net().model()
        assert run_passes(model, [PASS], told) == {"rotary_embedding": 0}
        assert operators(model) == before, "what was made to ask with is gone"
