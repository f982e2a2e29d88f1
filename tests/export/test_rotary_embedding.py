"""Rotary embeddings move into attention or become one operator with the same tables, in every written form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.passes import views
from partita.export.passes.rotary_embedding import PASS
from tests.export.nets import (
    LATEST,
    LENGTH,
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

HEADS, KV_HEADS, WIDTH = 4, 2, 32


def tables(turned: int, *, scaling: float = 1.0, repeat: str = "halves", base: float = 100.0) -> tuple[Array, Array]:
    """Cosines and sines [N, R], as models look them up; [N, R/2] with `repeat` empty."""
    angles = np.arange(LENGTH)[:, None] * base ** -(np.arange(turned // 2) / turned * 2)[None]
    if repeat == "halves":
        angles = np.concatenate([angles, angles], 1)
    if repeat == "neighbours":
        angles = np.repeat(angles, 2, 1)
    return (np.cos(angles) * scaling).astype(np.float32), (np.sin(angles) * scaling).astype(np.float32)


def cut(net: Net, x: ir.Value, start: int, stop: int, step: int = 1, axis: int = -1) -> ir.Value:
    numbers = [net.constant([number], np.int64) for number in (start, stop, axis, step)]
    return net.op("Slice", x, *numbers)


def halves(net: Net, x: ir.Value, cos: ir.Value, sin: ir.Value, turned: int) -> ir.Value:
    """x * cos + rotate_half(x) * sin of the first `turned`, the rest as it is."""
    part = x if turned == WIDTH else cut(net, x, 0, turned)
    half = net.op("Concat", net.op("Neg", cut(net, part, turned // 2, turned)), cut(net, part, 0, turned // 2), axis=-1)
    done = net.op("Add", net.op("Mul", part, cos), net.op("Mul", half, sin))
    return done if turned == WIDTH else net.op("Concat", done, cut(net, x, turned, WIDTH), axis=-1)


def neighbours(net: Net, x: ir.Value, cos: ir.Value, sin: ir.Value, turned: int) -> ir.Value:
    """The same of pairs (0, 1), (2, 3), ..., stacked again."""
    part = x if turned == WIDTH else cut(net, x, 0, turned)
    last = net.constant([-1], np.int64)
    even, odd = (net.op("Unsqueeze", cut(net, part, start, turned, 2), last) for start in (0, 1))
    stacked = net.op("Concat", net.op("Neg", odd), even, axis=-1)
    heads = x.shape[1] if x.shape is not None else HEADS
    turned_round = net.op("Reshape", stacked, net.constant([1, heads, -1, turned], np.int64))
    done = net.op("Add", net.op("Mul", part, cos), net.op("Mul", turned_round, sin))
    return done if turned == WIDTH else net.op("Concat", done, cut(net, x, turned, WIDTH), axis=-1)


def by_columns(net: Net, x: ir.Value, cos: ir.Value, sin: ir.Value, turned: int) -> ir.Value:
    """Both halves by themselves, with tables of half the width."""
    one, two = cut(net, x, 0, WIDTH // 2), cut(net, x, WIDTH // 2, WIDTH)
    first = net.op("Sub", net.op("Mul", one, cos), net.op("Mul", two, sin))
    second = net.op("Add", net.op("Mul", two, cos), net.op("Mul", one, sin))
    return net.op("Concat", first, second, axis=-1)


def neighbours_to_halves(net: Net, x: ir.Value, cos: ir.Value, sin: ir.Value, turned: int) -> ir.Value:
    """Pairs (0, 1), (2, 3), ... that are put one half behind the other, with tables of half the width."""
    one, two = (cut(net, x, start, turned, 2) for start in (0, 1))
    first = net.op("Sub", net.op("Mul", one, cos), net.op("Mul", two, sin))
    second = net.op("Add", net.op("Mul", two, cos), net.op("Mul", one, sin))
    return net.op("Concat", first, second, axis=-1)


def halves_to_neighbours(net: Net, x: ir.Value, cos: ir.Value, sin: ir.Value, turned: int) -> ir.Value:
    """Halves that become pairs (0, 1), (2, 3), ..., likewise."""
    one, two = cut(net, x, 0, turned // 2), cut(net, x, turned // 2, turned)
    first = net.op("Sub", net.op("Mul", one, cos), net.op("Mul", two, sin))
    second = net.op("Add", net.op("Mul", two, cos), net.op("Mul", one, sin))
    last = net.constant([-1], np.int64)
    stacked = net.op("Concat", net.op("Unsqueeze", first, last), net.op("Unsqueeze", second, last), axis=-1)
    heads = x.shape[1] if x.shape is not None else HEADS
    return net.op("Reshape", stacked, net.constant([1, heads, -1, turned], np.int64))


def stretched(where: str, form: Any = halves, factor: float = 1.3) -> Any:
    """A form whose cosines and sines are multiplied by a number, or what is turned, before it or after."""

    def made(net: Net, x: ir.Value, cos: ir.Value, sin: ir.Value, turned: int) -> ir.Value:
        def times(value: ir.Value) -> ir.Value:
            product: ir.Value = net.op("Mul", value, net.constant(factor))
            product.shape, product.type = value.shape, value.type
            return product

        if where == "waves":
            cos, sin = times(cos), times(sin)
        y = form(net, times(x) if where == "before" else x, cos, sin, turned)
        y.shape, y.type = x.shape, x.type
        return times(y) if where == "after" else y

    return made


def heads_of(net: Net, x: ir.Value, heads: int, rows: int = 1) -> ir.Value:
    """[B, S, H*D] -> [B, H, S, D]."""
    made = net.op(
        "Transpose", net.op("Reshape", x, net.constant([rows, -1, heads, WIDTH], np.int64)), perm=[0, 2, 1, 3]
    )
    made.shape, made.type = ir.Shape([rows, heads, "s", WIDTH]), ir.TensorType(ir.DataType.FLOAT)
    return made


def attention_net(
    form: Any = halves,
    turned: int = WIDTH,
    *,
    waves: Any = None,
    key_waves: Any = None,
    key_read: bool = False,
    offset: bool = False,
) -> Net:
    """Queries and keys turned by position, and attention over them."""
    made = Net()
    positions = made.input("positions", [1, "s"], ir.DataType.INT32)
    where = made.op("Add", positions, made.constant([2], np.int32)) if offset else positions
    axis = made.constant([1], np.int64)
    flat = []
    for name, heads, pair in (
        ("q", HEADS, waves or tables(turned)),
        ("k", KV_HEADS, key_waves or waves or tables(turned)),
    ):
        cos, sin = (made.op("Unsqueeze", made.op("Gather", made.constant(wave), where, axis=0), axis) for wave in pair)
        x = heads_of(made, made.input(name, [1, "s", heads * WIDTH]), heads)
        y = form(made, x, cos, sin, turned)
        y.shape, y.type = x.shape, x.type
        if name == "k" and key_read:
            made.give(y, "turned keys")
        back = made.op("Transpose", y, perm=[0, 2, 1, 3])
        flat.append(made.op("Reshape", back, made.constant([1, -1, heads * WIDTH], np.int64)))
    value = made.input("v", [1, "s", KV_HEADS * WIDTH])
    attention(made, (*flat, value), HEADS, KV_HEADS, WIDTH, LENGTH, scale=0.2)
    return made


def fed_to_attention(start: int, tokens: int) -> dict[str, Array]:
    """Some tokens after `start` others."""
    return {
        "positions": np.arange(start, start + tokens, dtype=np.int32)[None],
        "q": random(1, tokens, HEADS * WIDTH),
        "k": random(1, tokens, KV_HEADS * WIDTH, seed=1),
        "v": random(1, tokens, KV_HEADS * WIDTH, seed=2),
        **attention_feed(KV_HEADS, WIDTH, start, tokens, LENGTH),
    }


IN_ATTENTION: dict[str, dict[str, Any]] = {
    "all of a head": {},
    "half of a head": {"turned": 16},
    "neighbours": {"form": neighbours, "waves": tables(WIDTH, repeat="neighbours")},
    "neighbours in half of a head": {"form": neighbours, "turned": 16, "waves": tables(16, repeat="neighbours")},
    "neighbours in a quarter of a head, which is widened": {
        "form": neighbours,
        "turned": 8,
        "waves": tables(8, repeat="neighbours"),
    },
    "halves by themselves": {"form": by_columns, "waves": tables(WIDTH, repeat="")},
    "scaled": {"waves": tables(WIDTH, scaling=1.3)},
    "cosines and sines are scaled": {"form": stretched("waves")},
    "those of half of a head are scaled": {"form": stretched("waves"), "turned": 16},
    "those of neighbours are scaled": {
        "form": stretched("waves", neighbours, 0.7),
        "waves": tables(WIDTH, repeat="neighbours"),
    },
    "scaled before it": {"form": stretched("before")},
    "scaled after it": {"form": stretched("after")},
    "frequencies of zero": {"waves": tables(WIDTH, base=1.0)},
}


@pytest.mark.parametrize("form", IN_ATTENTION)
@pytest.mark.parametrize(("start", "tokens"), [(0, 6), (9, 1), (9, 4)])
def test_rotary_embedding_is_fused_into_gqa(tmp_path: Path, form: str, start: int, tokens: int) -> None:
    model = rewritten(
        lambda: attention_net(**IN_ATTENTION[form]), PASS, tmp_path, fed_to_attention(start, tokens), context("contrib")
    )
    assert run_passes(model, [views.PASS], context("contrib")) == {"views": 2}
    assert operators(model) == ["GroupQueryAttention"], "nothing else is left, and nothing reads the positions"
    assert not next(value for value in model.graph.inputs if value.name == "positions").uses()
    names = sorted(name for name in model.graph.initializers if name.startswith("rotary"))
    assert names == ["rotary.cos.0", "rotary.sin.0"], "one pair for queries and keys"


OTHERS: dict[str, dict[str, Any]] = {
    "keys are turned otherwise": {"key_waves": tables(WIDTH, base=7.0)},
    "turned keys are read elsewhere": {"key_read": True},
    "positions are moved": {"offset": True},
    "a part that the operator does not turn": {"turned": 24},
    "neighbours that come out as halves": {"form": neighbours_to_halves, "waves": tables(WIDTH, repeat="")},
    "queries and keys are scaled otherwise": {
        "waves": tables(WIDTH, scaling=1.3),
        "key_waves": tables(WIDTH, scaling=0.7),
    },
    "cosines and sines of different angles": {"waves": (tables(WIDTH)[0], tables(WIDTH, repeat="neighbours")[1])},
}


WITHOUT_OPERATOR = context("contrib", refused={"RotaryEmbedding"})


@pytest.mark.parametrize("kind", OTHERS)
def test_rotary_forms_unsupported_by_gqa_are_not_fused(kind: str) -> None:
    left_alone(lambda: attention_net(**OTHERS[kind]), PASS, WITHOUT_OPERATOR)


def test_rotary_is_fused_if_target_rejects_every_gqa_form(tmp_path: Path) -> None:
    told = context("contrib", refused={"GroupQueryAttention"})
    model = rewritten(attention_net, PASS, tmp_path, fed_to_attention(9, 4), told)
    assert "Concat" not in operators(model)


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


def changed(make: Any, fed: dict[str, Array], folder: Path, told: Any, places: int = 2) -> ir.Model:
    """The model after the pass, which has changed so many places and no value."""
    before = run(make().model(), folder, fed)
    model = make().model()
    assert run_passes(model, [PASS], told) == {"rotary_embedding": places}
    for one, other in zip(before, run(model, folder, fed), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5)
    return model


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
def test_rotary_embedding_operator_is_used_with_standard_attention(tmp_path: Path, form: str) -> None:
    rows = FORMS[form].get("rows", 2)
    model = changed(lambda: net(**FORMS[form]), feed(rows), tmp_path, context("standard"))
    left = [name for name in operators(model) if name not in ("Reshape", "Transpose")]
    assert left.count("Gather") == 2, "the tables are looked up once for queries and keys"
    assert sorted(left) == sorted(["Gather"] * 2 + ["RotaryEmbedding"] * 2 + ["TensorScatter", "Attention"])


@pytest.mark.parametrize("kind", ["keys are turned otherwise", "a part that the operator does not turn"])
def test_rotary_embedding_operator_precedes_gqa_without_rotary(tmp_path: Path, kind: str) -> None:
    model = changed(lambda: attention_net(**OTHERS[kind]), fed_to_attention(9, 4), tmp_path, context("contrib"))
    assert operators(model).count("Cast") == 1, "positions are widened once"
    assert not {"Gather", "Mul", "Neg"} & set(operators(model))


def test_positions_are_cast_to_int64_despite_other_casts(tmp_path: Path) -> None:
    def make() -> Net:
        made = attention_net(**OTHERS["keys are turned otherwise"])
        made.give(made.op("Cast", made.inputs[0], to=int(ir.DataType.FLOAT)), "positions as floats")
        return made

    model = changed(make, fed_to_attention(9, 4), tmp_path, context("contrib"))
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
def test_rotation_of_last_part_of_head_becomes_rotary_embedding(tmp_path: Path, fused: Any, form: str) -> None:
    model = changed(lambda: last_part(fused, **PARTS[form]), LAST_PART_FEED, tmp_path, context(fused))
    moved = 2 if "come out" in form else 0
    looked_up = 2 if fused == "standard" else 0
    left = operators(model)
    assert left.count("RotaryEmbedding") == 2 and left.count("Gather") == moved + looked_up
    assert not {"Sub", "Add", "Neg", "Slice"} & set(left) and left.count("Mul") == 1, "the scale is all that is left"


def test_reordered_rotation_requires_gather_support() -> None:
    kind = PARTS["neighbours that come out as halves"]
    left_alone(lambda: last_part("contrib", **kind), PASS, context("contrib", refused={"Gather"}))


def test_rotary_fusion_requires_target_support() -> None:
    left_alone(lambda: attention_net(offset=True), PASS, context("contrib"))
    refuses = context(
        "contrib",
        refused={"RotaryEmbedding"},
        refuses=lambda node: node.op_type == "GroupQueryAttention" and bool(node.attributes.get_int("do_rotary", 0)),
    )
    left_alone(attention_net, PASS, refuses)
    left_alone(net, PASS, context("standard", refused={"RotaryEmbedding"}))
    left_alone(net, PASS, context("none"))
