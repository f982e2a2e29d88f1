"""A rotary embedding becomes one operator where attention does not turn queries and keys itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.passes.manager import run as run_passes
from partita.export.passes.rotary_embedding import PASS
from tests.export.nets import LATEST, LENGTH, Array, Net, context, left_alone, operators, random, run
from tests.export.test_rotary_attention import (
    HEADS,
    KV_HEADS,
    OTHERS,
    WIDTH,
    halves,
    halves_to_neighbours,
    heads_of,
    neighbours,
    neighbours_to_halves,
    stretched,
    tables,
)
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


def test_positions_that_the_model_casts_otherwise_are_widened_all_the_same(tmp_path: Path) -> None:
    def make() -> Net:
        made = gqa_net(**OTHERS["keys are turned otherwise"])
        made.give(made.op("Cast", made.inputs[0], to=int(ir.DataType.FLOAT)), "positions as floats")
        return made

    before = run(make().model(), tmp_path, gqa_feed(9, 4))
    model = make().model()
    assert run_passes(model, [PASS], context("contrib")) == {"rotary_embedding": 2}
    for one, other in zip(before, run(model, tmp_path, gqa_feed(9, 4)), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5)
    assert operators(model).count("Cast") == 2


def complex_numbers(net: Net, x: ir.Value, cos: ir.Value, sin: ir.Value, turned: int) -> ir.Value:
    """Pairs (0, 1), (2, 3), ... as complex numbers, times those of the position, written in real ones."""
    last, places = net.constant([-1], np.int64), [net.constant(place, np.int64) for place in (0, 1)]
    heads = x.shape[1] if x.shape is not None else HEADS
    pairs = net.op("Reshape", x, net.constant([1, heads, -1, turned // 2, 2], np.int64))
    wave = net.op("Concat", net.op("Unsqueeze", cos, last), net.op("Unsqueeze", sin, last), axis=-1)
    one, two = (net.op("Gather", pairs, place, axis=4) for place in places)
    real, imaginary = (net.op("Gather", wave, place, axis=4) for place in places)
    first = net.op("Sub", net.op("Mul", one, real), net.op("Mul", two, imaginary))
    second = net.op("Add", net.op("Mul", one, imaginary), net.op("Mul", two, real))
    stacked = net.op("Concat", net.op("Unsqueeze", first, last), net.op("Unsqueeze", second, last), axis=-1)
    return net.op("Reshape", stacked, net.constant([1, heads, -1, turned], np.int64))


REST = 16
"""Numbers of a head before those that are turned."""
PARTS: dict[str, dict[str, Any]] = {
    "halves": {"form": halves},
    "neighbours": {"form": neighbours, "waves": tables(WIDTH, repeat="neighbours")},
    "neighbours that come out as halves": {"form": neighbours_to_halves, "waves": tables(WIDTH, repeat="")},
    "complex numbers": {"form": complex_numbers, "waves": tables(WIDTH, repeat="")},
    "complex numbers that are scaled": {"form": stretched("waves", complex_numbers), "waves": tables(WIDTH, repeat="")},
    "halves that come out as neighbours": {"form": halves_to_neighbours, "waves": tables(WIDTH, repeat="")},
}


def last_part(fused: Any, form: Any, waves: tuple[Array, Array] = tables(WIDTH)) -> Net:
    """Queries whose last part is turned, and scaled with the rest; one head of keys that is turned and repeated."""
    made = Net(LATEST[fused])
    positions = made.input("positions", [1, "s"], ir.DataType.INT32)
    axis = made.constant([1], np.int64)
    cos, sin = (made.op("Unsqueeze", made.op("Gather", made.constant(wave), positions, axis=0), axis) for wave in waves)

    def turned(x: ir.Value, heads: int) -> ir.Value:
        x.shape, x.type = ir.Shape([1, heads, "s", WIDTH]), ir.TensorType(ir.DataType.FLOAT)
        y: ir.Value = form(made, x, cos, sin, WIDTH)
        y.shape, y.type = x.shape, x.type
        return y

    rest, part = made.op(
        "Split",
        made.input("q", [1, HEADS, "s", REST + WIDTH]),
        made.constant([REST, WIDTH], np.int64),
        outputs=2,
        axis=3,
    )
    query = made.op("Mul", made.op("Concat", rest, turned(part, HEADS), axis=-1), made.constant(0.25))
    flat = made.op("Reshape", query, made.constant([1, HEADS, -1, REST + WIDTH], np.int64))
    made.give(made.op("MatMul", flat, made.constant(random(REST + WIDTH, 5, seed=7))))
    one = turned(made.input("k", [1, 1, "s", WIDTH]), 1)
    repeated = made.op("Expand", one, made.constant([1, HEADS, 1, 1], np.int64))
    key = made.op("Concat", made.input("k rest", [1, HEADS, "s", REST]), repeated, axis=-1)
    made.give(made.op("MatMul", key, made.constant(random(REST + WIDTH, 5, seed=8))), "keys")
    return made


LAST_PART_FEED = {
    "positions": np.arange(9, 13, dtype=np.int32)[None],
    "q": random(1, HEADS, 4, REST + WIDTH),
    "k": random(1, 1, 4, WIDTH, seed=1),
    "k rest": random(1, HEADS, 4, REST, seed=2),
}


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("fused", ["contrib", "standard"])
def test_the_last_part_of_a_head(tmp_path: Path, fused: Any, form: str) -> None:
    before = run(last_part(fused, **PARTS[form]).model(), tmp_path, LAST_PART_FEED)
    model = last_part(fused, **PARTS[form]).model()
    assert run_passes(model, [PASS], context(fused)) == {"rotary_embedding": 2}
    for one, other in zip(before, run(model, tmp_path, LAST_PART_FEED), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5)
    moved = 2 if "come out" in form else 0
    looked_up = 2 if fused == "standard" else 0
    left = operators(model)
    assert left.count("RotaryEmbedding") == 2 and left.count("Gather") == moved + looked_up
    assert not {"Sub", "Add", "Neg", "Slice"} & set(left) and left.count("Mul") == 1, "the scale is all that is left"


def test_a_part_in_another_order_only_where_the_target_takes_that(tmp_path: Path) -> None:
    def make() -> Net:
        return last_part("contrib", **PARTS["neighbours that come out as halves"])

    left_alone(make, PASS, context("contrib", refused={"Gather"}))


def test_positions_that_are_moved_stay() -> None:
    model = gqa_net(offset=True).model()
    assert run_passes(model, [PASS], context("contrib")) == {"rotary_embedding": 0}


def test_only_where_the_target_takes_it() -> None:
    before = operators(net().model())
    for told in (context("standard", refused={"RotaryEmbedding"}), context("none")):
        model = net().model()
        assert run_passes(model, [PASS], told) == {"rotary_embedding": 0}
        assert operators(model) == before, "what was made to ask with is gone"
