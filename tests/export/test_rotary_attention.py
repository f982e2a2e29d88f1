"""Attention turns queries and keys itself, by the same tables, however the rotary embedding was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.passes import views
from partita.export.passes.manager import run as run_passes
from partita.export.passes.rotary_attention import PASS
from tests.export.nets import LENGTH, Array, Net, context, left_alone, operators, random, rewritten

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


def net(
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
    cache = [made.input(name, [1, KV_HEADS, LENGTH, WIDTH]) for name in ("pk", "pv")]
    value = made.input("v", [1, "s", KV_HEADS * WIDTH])
    cursors = [made.input("last", [1], ir.DataType.INT32), made.input("total", [], ir.DataType.INT32)]
    output, *present = made.op(
        "com.microsoft::GroupQueryAttention",
        *flat,
        value,
        *cache,
        *cursors,
        outputs=3,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        scale=0.2,
    )
    made.give(output)
    for name, each in zip(("present key", "present value"), present, strict=True):
        made.give(each, name)
    return made


def feed(start: int, tokens: int) -> dict[str, Array]:
    """Some tokens after `start` others."""
    return {
        "positions": np.arange(start, start + tokens, dtype=np.int32)[None],
        "q": random(1, tokens, HEADS * WIDTH),
        "k": random(1, tokens, KV_HEADS * WIDTH, seed=1),
        "v": random(1, tokens, KV_HEADS * WIDTH, seed=2),
        "pk": random(1, KV_HEADS, LENGTH, WIDTH, seed=3),
        "pv": random(1, KV_HEADS, LENGTH, WIDTH, seed=4),
        "last": np.array([start + tokens - 1], np.int32),
        "total": np.array(start + tokens, np.int32),
    }


FORMS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("start", "tokens"), [(0, 6), (9, 1), (9, 4)])
def test_rotary_attention(tmp_path: Path, form: str, start: int, tokens: int) -> None:
    model = rewritten(lambda: net(**FORMS[form]), PASS, tmp_path, feed(start, tokens), context("contrib"))
    assert run_passes(model, [views.PASS], context("contrib")) == {"views": 2}
    assert operators(model) == ["GroupQueryAttention"], "nothing else is left, and nothing reads the positions"
    assert not next(value for value in model.graph.inputs if value.name == "positions").uses()


def test_a_table_is_there_once() -> None:
    model = net().model()
    other = net(waves=tables(WIDTH)).model()
    assert PASS.run(model, context("contrib")) == PASS.run(other, context("contrib")) == 1
    for each in (model, other):
        names = sorted(name for name in each.graph.initializers if name.startswith("rotary"))
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


@pytest.mark.parametrize("kind", OTHERS)
def test_what_the_operator_does_not_do_stays(kind: str) -> None:
    left_alone(lambda: net(**OTHERS[kind]), PASS, context("contrib"))


def test_only_where_the_target_takes_it() -> None:
    left_alone(net, PASS, context("contrib", refuses=lambda node: bool(node.attributes.get_int("do_rotary", 0))))
    left_alone(net, PASS, context("standard"))


def test_where_the_target_takes_no_form_of_the_operator_the_cpu_has_the_one_that_does_more(tmp_path: Path) -> None:
    told = context("contrib", refused={"GroupQueryAttention"})
    model = rewritten(net, PASS, tmp_path, feed(9, 4), told)
    assert "Concat" not in operators(model)
