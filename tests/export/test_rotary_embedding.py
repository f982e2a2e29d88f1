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


def heads_of(net: Net, x: ir.Value, heads: int) -> ir.Value:
    """[1, S, H*D] -> [1, H, S, D]."""
    made = net.op("Transpose", net.op("Reshape", x, net.numbers([1, -1, heads, WIDTH])), perm=[0, 2, 1, 3])
    made.shape, made.type = ir.Shape([1, heads, "s", WIDTH]), ir.TensorType(ir.DataType.FLOAT)
    return made


def attention_net(
    query: dict[str, Any] | None = None,
    key: dict[str, Any] | None = None,
    *,
    apart: bool = False,
    key_read: bool = False,
    offset: bool = False,
    rotates: bool = True,
    opset: int = 21,
) -> Net:
    """Queries and keys rotated by position, and attention over them; without rotations for `rotates` false."""
    made = Net(opset)
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
def test_rotary_embedding_is_fused_into_gqa(tmp_path: Path, kind: str, apart: bool) -> None:
    each = IN_ATTENTION[kind]
    model = attention_net(each, apart=apart).model()
    assert run_passes(model, [PASS, views.PASS], context("contrib")) == {"rotary_embedding": 1, "views": 2}
    assert operators(model) == ["GroupQueryAttention"], "nothing else is left, and nothing reads the positions"
    assert not next(value for value in model.graph.inputs if value.name == "positions").uses()
    names = sorted(name for name in model.graph.initializers if name.startswith("rotary"))
    assert names == ["rotary.cos.0", "rotary.sin.0"], "one pair for queries and keys"
    for start, tokens in ((0, 6), (9, 1), (9, 4)):
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


UNKNOWN: dict[str, dict[str, Any]] = {
    "positions are moved": {"offset": True},
    "different angles in a pair": {"query": form(repeat="neighbours")},
}


@pytest.mark.parametrize("kind", [*OTHERS, *UNKNOWN])
def test_rotations_without_tables_or_without_support_are_left(kind: str) -> None:
    told = context("contrib", refused={"RotaryEmbedding"} if kind in OTHERS else ())
    left_alone(lambda: attention_net(**(OTHERS | UNKNOWN)[kind]), PASS, told)


@pytest.mark.parametrize("each", [form(24), form(6, interleaved=True)], ids=["halves", "neighbours"])
@pytest.mark.parametrize("apart", [False, True])
def test_rotation_of_a_part_of_a_head_becomes_standard_operator(
    tmp_path: Path, each: dict[str, Any], apart: bool
) -> None:
    model = attention_net(each, apart=apart, opset=LATEST["standard"]).model()
    assert run_passes(model, [PASS], context("standard")) == {"rotary_embedding": 2}
    left, given = operators(model), feed(9, 4)
    assert left.count("RotaryEmbedding") == 2 and not {"Rotation", "Slice", "Concat"} & set(left)
    assert left.count("Gather") == 2, "looked up once for queries and keys"
    same(run(model, tmp_path, given), expected(given, tmp_path, each, each))


def test_rotary_fusion_requires_target_support() -> None:
    """A target that refuses GroupQueryAttention in every form gets the one with a rotation."""

    def rotates(node: ir.Node) -> bool:
        return node.op_type == "GroupQueryAttention" and bool(node.attributes.get_int("do_rotary", 0))

    left_alone(attention_net, PASS, context("contrib", refused={"RotaryEmbedding"}, refuses=rotates))
    left_alone(attention_net, PASS, context("standard", refused={"RotaryEmbedding"}))
    left_alone(attention_net, PASS, context("none"))
    told = context("contrib", refused={"GroupQueryAttention"})
    assert run_passes(attention_net().model(), [PASS], told) == {"rotary_embedding": 1}
