"""A product is timed beside a plain one; the best of several timings counts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from partita.providers.resolve import parse_chain, resolve
from partita.runtime.cpu import products
from partita.runtime.cpu.products import TRIES, Question, Timed, compared

(CPU,) = resolve(parse_chain("cpu"), ["CPUExecutionProvider"])


class Clock:
    """Times that a test makes up: in each try those of the products, and 1 for the plain one."""

    def __init__(self, *tries):
        self.tries = list(tries)
        self.asked = []

    def __call__(self, questions, cpu):
        self.asked.append([model for model, _ in questions])
        return [*self.tries.pop(0), 1.0]


def named(*names: str) -> list[Timed]:
    return [(name, partial(_made, name)) for name in names]


def _made(name: str) -> Question:
    return name.encode(), {}


PLAIN = named("plain")[0]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_KNOWN", {})


def test_a_known_product_is_neither_timed_nor_made_again():
    assert compared(named("a", "b"), PLAIN, CPU, Clock([0.2, 0.7])) == [(0.2, 1.0), (0.7, 1.0)]

    def never() -> Question:
        raise AssertionError("made again")

    clock = Clock([0.5])
    asked = [("a", never), *named("c"), ("b", never)]
    assert compared(asked, PLAIN, CPU, clock) == [(0.2, 1.0), (0.5, 1.0), (0.7, 1.0)]
    assert clock.asked == [[b"c", b"plain"]]
    assert compared(named("a"), named("other")[0], CPU, Clock([0.3])) == [(0.3, 1.0)], "another plain product"


def test_a_product_that_seems_slower_is_timed_again_and_the_best_counts():
    clock = Clock([0.2, 1.8, 1.8], [2.2, 0.4], [1.7])
    assert compared(named("a", "b", "c"), PLAIN, CPU, clock) == [(0.2, 1.0), (1.7, 1.0), (0.4, 1.0)]
    assert clock.asked == [[b"a", b"b", b"c", b"plain"], [b"b", b"c", b"plain"], [b"b", b"plain"]]
    assert len(clock.asked) == TRIES


def product(width: int, kind: int) -> Question:
    """x [1, 1, K] times a weight [K, K]."""
    numbers = np.zeros((width, width), helper.tensor_dtype_to_np_dtype(kind))
    weight = numpy_helper.from_array(numbers, "w")
    ports = [helper.make_tensor_value_info(name, kind, [1, 1, width]) for name in ("x", "y")]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "product", ports[:1], ports[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model.SerializeToString(), {"x": (1, 1, width)}


def test_sessions_are_really_timed():
    asked = [("large", lambda: product(1024, TensorProto.FLOAT)), ("half", lambda: product(64, TensorProto.FLOAT16))]
    (large, plain), (half, same) = compared(asked, ("small", lambda: product(64, TensorProto.FLOAT)), CPU)
    assert large > 4 * plain > 0, "256 times as many numbers"
    assert half > 0 and same > 0
