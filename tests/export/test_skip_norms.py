"""A residual sum and the norm that reads it become one operator; the sum is still there for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.export.passes.skip_norms import PASS
from tests.export.nets import Net, context, left_alone, operators, random, rewritten

WIDTH = 32
FEED = {"a": random(1, 4, WIDTH), "b": random(1, 4, WIDTH, seed=1)}
SIMPLIFIED, CENTRED = "SimplifiedLayerNormalization", "LayerNormalization"


def net(
    operator: str = SIMPLIFIED, *, sum_read: bool = True, bias: str = "", shift: bool = False, inner: str = "s"
) -> Net:
    made = Net()
    a, b = made.input("a", [1, "s", WIDTH]), made.input("b", [1, "s", WIDTH])
    if bias:
        terms = (b, made.constant(random(WIDTH, seed=2)))
        b = made.op("Add", *(terms if bias == "after" else terms[::-1]))
    total = made.op("Add", a, b)
    weights = [made.constant(random(WIDTH, seed=3)), *([made.constant(random(WIDTH, seed=4))] if shift else [])]
    y = made.op(operator, total, *weights, axis=-1, epsilon=1e-5, stash_type=1)
    y.shape, y.type = total.shape, total.type
    if sum_read:
        made.give(total, "sum")
    made.give(y)
    return made


@pytest.mark.parametrize("operator", [SIMPLIFIED, CENTRED])
@pytest.mark.parametrize("sum_read", [True, False])
@pytest.mark.parametrize("bias", ["", "before", "after"])
def test_skip_norms(tmp_path: Path, operator: str, sum_read: bool, bias: str) -> None:
    model = rewritten(lambda: net(operator, sum_read=sum_read, bias=bias), PASS, tmp_path, FEED, context("contrib"))
    assert operators(model) == [f"Skip{operator}"]


def test_a_shift_stays_what_it_is(tmp_path: Path) -> None:
    def make() -> Net:
        return net(CENTRED, shift=True, bias="after")

    assert operators(rewritten(make, PASS, tmp_path, FEED, context("contrib"))) == ["SkipLayerNormalization"]


def test_a_sum_that_two_norms_read_is_made_once(tmp_path: Path) -> None:
    def make() -> Net:
        made = net()
        total = made.outputs[0].producer().inputs[0]  # type: ignore[union-attr]
        second = made.op(SIMPLIFIED, total, made.constant(random(WIDTH, seed=9)), axis=-1, epsilon=1e-6, stash_type=1)
        made.give(second, "second")
        return made

    model = rewritten(make, PASS, tmp_path, FEED, context("contrib"))
    assert operators(model) == ["SkipSimplifiedLayerNormalization", SIMPLIFIED]


def test_a_weight_that_is_computed_after_the_sum(tmp_path: Path) -> None:
    """As those that are kept around zero are: 1 + w, in every norm."""

    def make() -> Net:
        made = Net()
        total = made.op("Add", made.input("a", [1, "s", WIDTH]), made.input("b", [1, "s", WIDTH]))
        weight = made.op("Add", made.constant(random(WIDTH, seed=3)), made.constant(random(WIDTH, seed=4)))
        made.give(made.op(SIMPLIFIED, total, weight, axis=-1, epsilon=1e-5, stash_type=1))
        return made

    model = rewritten(make, PASS, tmp_path, FEED, context("contrib"))
    assert operators(model) == ["Add", "SkipSimplifiedLayerNormalization"]


def test_what_is_no_sum_of_two_alike_stays() -> None:
    def one_of_both() -> Net:
        made = Net()
        total = made.op("Add", made.input("a", [1, "s", WIDTH]), made.input("b", [1, 1, WIDTH]))
        y = made.op(SIMPLIFIED, total, made.constant(random(WIDTH)), axis=-1, epsilon=1e-5, stash_type=1)
        made.give(y)
        return made

    left_alone(one_of_both, PASS, context("contrib"))


def test_only_where_the_target_takes_it() -> None:
    left_alone(net, PASS, context("contrib", refused={"SkipSimplifiedLayerNormalization"}))
    left_alone(net, PASS, context("standard"))
    left_alone(net, PASS, context("none"))
