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


def test_what_is_known_is_neither_timed_nor_made_again():
    clock = Clock([0.2, 0.7])
    assert compared(named("a", "b"), PLAIN, CPU, clock) == [(0.2, 1.0), (0.7, 1.0)]

    def never() -> Question:
        raise AssertionError("made again")

    again = Clock([0.5])
    asked = [("a", never), *named("c"), ("b", never)]
    assert compared(asked, PLAIN, CPU, again) == [(0.2, 1.0), (0.5, 1.0), (0.7, 1.0)]
    assert again.asked == [[b"c", b"plain"]]
    assert compared([("a", never), ("b", never)], ("plain", never), CPU, Clock()) == [(0.2, 1.0), (0.7, 1.0)]
    other = Clock([0.3])
    assert compared(named("a"), named("other")[0], CPU, other) == [(0.3, 1.0)], "beside another it is another question"


@pytest.mark.parametrize(
    ("tries", "best"),
    [([[0.4]], 0.4), ([[1.8], [0.4]], 0.4), ([[1.8], [2.2], [1.7]], 1.7), ([[30.0], [3.0], [0.5]], 0.5)],
)
def test_what_seems_slower_is_timed_again_and_the_best_is_believed(tries: list[list[float]], best: float) -> None:
    clock = Clock(*tries)
    assert compared(named("a"), PLAIN, CPU, clock) == [(best, 1.0)]
    assert len(clock.asked) == len(tries) <= TRIES


def test_only_what_seems_slower_is_timed_again():
    clock = Clock([0.2, 5.0], [5.0], [5.0])
    compared(named("a", "b"), PLAIN, CPU, clock)
    assert clock.asked == [[b"a", b"b", b"plain"], *[[b"b", b"plain"]] * 2]


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
