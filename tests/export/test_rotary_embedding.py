"""Placeholders of rotary embeddings move into attention or become one operator with the same tables."""

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
    run,
    run_passes,
)

HEADS, KV_HEADS, WIDTH = 4, 2, 32


def tables(turned: int, *, repeat: str = "halves", base: float = 100.0) -> tuple[Array, Array]:
    """Cosines and sines [N, R], as models look them up; [N, R/2] with `repeat` empty."""
    angles = np.arange(LENGTH)[:, None] * base ** -(np.arange(turned // 2) / turned * 2)[None]
    if repeat == "halves":
        angles = np.concatenate([angles, angles], 1)
    if repeat == "neighbours":
        angles = np.repeat(angles, 2, 1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def form(turned: int = WIDTH, *, interleaved: bool = False, own: bool = True, **waves: Any) -> dict[str, Any]:
    """The attributes of a placeholder, and its tables. `own`: each number of a pair has a column of a table."""
    repeat = waves.pop("repeat", "neighbours" if interleaved else "halves")
    half = range(turned // 2)
    first, second = pairs(turned, interleaved) if own else (half, half)
    attributes = {"interleaved": int(interleaved), "first": [*first], "second": [*second]}
    return {"attributes": attributes, "waves": tables(turned, repeat=repeat, **waves)}


def pairs(turned: int, interleaved: bool) -> tuple[range, range]:
    """The first and the second number of each pair."""
    if interleaved:
        return range(0, turned, 2), range(1, turned, 2)
    return range(turned // 2), range(turned // 2, turned)


def rotated(x: Array, positions: Array, attributes: dict[str, Any], waves: tuple[Array, Array]) -> Array:
    """x [B, H, S, D] at `positions` [B, S], by the definition."""
    y = x.copy()
    first, second = pairs(2 * len(attributes["first"]), bool(attributes["interleaved"]))
    cos, sin = (wave[positions][:, None][..., attributes["first"]] for wave in waves)
    y[..., first], y[..., second] = (
        x[..., first] * cos - x[..., second] * sin,
        x[..., second] * cos + x[..., first] * sin,
    )
    return y


def placeholder(net: Net, x: ir.Value, positions: ir.Value, each: dict[str, Any], *, apart: bool = False) -> ir.Value:
    """The rotation of x [B, H, S, D]; `apart`: the model cuts off the first numbers that are rotated."""
    waves = [net.op("Gather", net.constant(wave), positions, axis=0) for wave in each["waves"]]
    turned, last = 2 * len(each["attributes"]["first"]), net.numbers([-1])
    part = net.op("Slice", x, net.numbers([0]), net.numbers([turned]), last) if apart else x
    y: ir.Value = net.op("partita::Rotation", part, *waves, **each["attributes"])
    shape = [*(x.shape or ())]
    part.shape = y.shape = ir.Shape([*shape[:3], turned if apart else shape[3]])
    part.type = y.type = ir.TensorType(ir.DataType.FLOAT)
    if apart:
        y = net.op("Concat", y, net.op("Slice", x, net.numbers([turned]), net.numbers([WIDTH]), last), axis=-1)
        y.shape, y.type = x.shape, x.type
    return y


def heads_of(net: Net, x: ir.Value, heads: int, rows: int = 1) -> ir.Value:
    """[B, S, H*D] -> [B, H, S, D]."""
    made = net.op("Transpose", net.op("Reshape", x, net.numbers([rows, -1, heads, WIDTH])), perm=[0, 2, 1, 3])
    made.shape, made.type = ir.Shape([rows, heads, "s", WIDTH]), ir.TensorType(ir.DataType.FLOAT)
    return made


def attention_net(
    query: dict[str, Any] | None = None,
    key: dict[str, Any] | None = None,
    *,
    apart: bool = False,
    key_read: bool = False,
    offset: bool = False,
    rotates: bool = True,
) -> Net:
    """Queries and keys rotated by position, and attention over them; without rotations for `rotates` false."""
    made = Net()
    positions = made.input("positions", [1, "s"], ir.DataType.INT32)
    where = made.op("Add", positions, made.constant([2], np.int32)) if offset else positions
    query = query or form()
    flat = []
    for name, heads, each in (("q", HEADS, query), ("k", KV_HEADS, key or query)):
        x = heads_of(made, made.input(name, [1, "s", heads * WIDTH]), heads)
        y = placeholder(made, x, where, each, apart=apart) if rotates else x
        if name == "k" and key_read:
            made.give(y, "rotated keys")
        back = made.op("Transpose", y, perm=[0, 2, 1, 3])
        flat.append(made.op("Reshape", back, made.numbers([1, -1, heads * WIDTH])))
    value = made.input("v", [1, "s", KV_HEADS * WIDTH])
    attention(made, (*flat, value), HEADS, KV_HEADS, WIDTH, LENGTH, scale=0.2)
    return made


def feed(start: int, tokens: int) -> dict[str, Array]:
    """Some tokens after `start` others."""
    return {
        "positions": np.arange(start, start + tokens, dtype=np.int32)[None],
        "q": random(1, tokens, HEADS * WIDTH),
        "k": random(1, tokens, KV_HEADS * WIDTH, seed=1),
        "v": random(1, tokens, KV_HEADS * WIDTH, seed=2),
        **attention_feed(KV_HEADS, WIDTH, start, tokens, LENGTH),
    }


def expected(given: dict[str, Array], folder: Path, query: dict[str, Any], key: dict[str, Any]) -> list[Array]:
    """Attention over queries and keys that were rotated before."""
    tokens, turned = given["q"].shape[1], dict(given)
    for name, each in (("q", query), ("k", key)):
        x = given[name].reshape(1, tokens, -1, WIDTH).transpose(0, 2, 1, 3)
        turned[name] = rotated(x, given["positions"], **each).transpose(0, 2, 1, 3).reshape(1, tokens, -1)
    return run(attention_net(rotates=False).model(), folder, turned)


def same(found: list[Array], wanted: list[Array]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


IN_ATTENTION: dict[str, dict[str, Any]] = {
    "a whole head": form(),
    "half of a head": form(16),
    "neighbours": form(interleaved=True),
    "neighbours in half of a head": form(16, interleaved=True),
    "tables of half the width": form(own=False, repeat=""),
    "only half of a table is read": form(interleaved=True, own=False, repeat="halves"),
    "frequencies of zero": form(base=1.0),
}


@pytest.mark.parametrize(
    ("kind", "apart"),
    [
        (kind, apart)
        for kind, each in IN_ATTENTION.items()
        for apart in {False, 2 * len(each["attributes"]["first"]) < WIDTH}
    ],
)
@pytest.mark.parametrize(("start", "tokens"), [(0, 6), (9, 1), (9, 4)])
def test_rotary_embedding_is_fused_into_gqa(tmp_path: Path, kind: str, apart: bool, start: int, tokens: int) -> None:
    each = IN_ATTENTION[kind]
    model = attention_net(each, apart=apart).model()
    assert run_passes(model, [PASS, views.PASS], context("contrib")) == {"rotary_embedding": 1, "views": 2}
    assert operators(model) == ["GroupQueryAttention"], "nothing else is left, and nothing reads the positions"
    assert not next(value for value in model.graph.inputs if value.name == "positions").uses()
    names = sorted(name for name in model.graph.initializers if name.startswith("rotary"))
    assert names == ["rotary.cos.0", "rotary.sin.0"], "one pair for queries and keys"
    given = feed(start, tokens)
    same(run(model, tmp_path, given), expected(given, tmp_path, each, each))


OTHERS: dict[str, dict[str, Any]] = {
    "keys of other angles": {"key": form(base=7.0)},
    "rotated keys are read elsewhere": {"key_read": True},
    "a part that the operator does not rotate": {"query": form(24)},
    "neighbours in a quarter of a head": {"query": form(8, interleaved=True)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_forms_unsupported_by_gqa_become_an_operator_before_it(tmp_path: Path, kind: str) -> None:
    model = attention_net(**OTHERS[kind]).model()
    assert run_passes(model, [PASS], context("contrib")) == {"rotary_embedding": 2}
    left = operators(model)
    assert left.count("RotaryEmbedding") == 2 and left.count("Cast") == 1, "positions are widened once"
    assert not {"Gather", "Rotation"} & set(left)
    query, given = OTHERS[kind].get("query", form()), feed(9, 4)
    found = run(model, tmp_path, given)[-3:]
    same(found, expected(given, tmp_path, query, OTHERS[kind].get("key", query)))


@pytest.mark.parametrize("kind", OTHERS)
def test_forms_unsupported_by_gqa_and_the_target_are_left(kind: str) -> None:
    left_alone(lambda: attention_net(**OTHERS[kind]), PASS, context("contrib", refused={"RotaryEmbedding"}))


UNKNOWN: dict[str, dict[str, Any]] = {
    "positions are moved": {"offset": True},
    "different angles in a pair": {"query": form(repeat="neighbours")},
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_rotations_without_tables_are_left(kind: str) -> None:
    left_alone(lambda: attention_net(**UNKNOWN[kind]), PASS, context("contrib"))


def test_positions_are_cast_to_int64_despite_other_casts() -> None:
    made = attention_net(key=form(base=7.0))
    made.give(made.op("Cast", made.inputs[0], to=int(ir.DataType.FLOAT)), "positions as floats")
    model = made.model()
    assert run_passes(model, [PASS], context("contrib")) == {"rotary_embedding": 2}
    assert operators(model).count("Cast") == 2


def heads_net(fused: Any, each: dict[str, Any], *, apart: bool, rows: int = 2) -> Net:
    """The heads of a batch, rotated."""
    made = Net(LATEST[fused])
    positions = made.input("positions", [rows, "s"], ir.DataType.INT32)
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        x = made.input(name, [rows, heads, "s", WIDTH])
        made.give(made.op("Neg", placeholder(made, x, positions, each, apart=apart)), f"rotated {name}")
    return made


FORMS: dict[str, dict[str, Any]] = {
    "a whole head": form(),
    "a part of a head": form(24),
    "neighbours": form(interleaved=True),
    "neighbours in a part of a head": form(6, interleaved=True),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("fused", ["contrib", "standard"])
def test_rotary_embedding_operator_is_used(tmp_path: Path, fused: Any, kind: str, apart: bool) -> None:
    model = heads_net(fused, FORMS[kind], apart=apart).model()
    assert run_passes(model, [PASS], context(fused)) == {"rotary_embedding": 2}
    left = operators(model)
    assert left.count("RotaryEmbedding") == 2 and not {"Rotation", "Slice", "Concat"} & set(left)
    assert left.count("Gather") == (2 if fused == "standard" else 0), "looked up once for queries and keys"
    positions = (np.array([[3], [9]]) + np.arange(4)).astype(np.int32)
    given = {"positions": positions, "q": random(2, HEADS, 4, WIDTH), "k": random(2, KV_HEADS, 4, WIDTH, seed=1)}
    same(run(model, tmp_path, given), [-rotated(given[name], positions, **FORMS[kind]) for name in ("q", "k")])


def test_rotary_fusion_requires_target_support() -> None:
    refuses = context(
        "contrib",
        refused={"RotaryEmbedding"},
        refuses=lambda node: node.op_type == "GroupQueryAttention" and bool(node.attributes.get_int("do_rotary", 0)),
    )
    left_alone(attention_net, PASS, refuses)
    left_alone(lambda: heads_net("standard", form(), apart=False), PASS, context("none"))
    told = context("standard", refused={"RotaryEmbedding"})
    left_alone(lambda: heads_net("standard", form(), apart=False), PASS, told)


def test_rotary_is_fused_if_target_rejects_every_gqa_form() -> None:
    model = attention_net().model()
    told = context("contrib", refused={"GroupQueryAttention"})
    assert run_passes(model, [PASS], told) == {"rotary_embedding": 1}
