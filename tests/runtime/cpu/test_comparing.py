"""A product is timed beside a plain one once per machine; only what is clearly slower is believed to be."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from partita.providers.resolve import parse_chain, resolve
from partita.runtime.cpu import comparing
from partita.runtime.cpu.comparing import KIND, TRIES, Timed, compared
from partita.runtime.cpu.products import Question

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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nothing is kept yet."""
    monkeypatch.setenv("PARTITA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(comparing, "_IN_MEMORY", {})
    return tmp_path / KIND


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
    ("tries", "best", "timed", "kept"),
    [
        ([[0.4]], 0.4, 1, True),
        ([[1.8], [0.4]], 0.4, 2, True),  # a busy machine
        ([[0.95]], 0.95, 1, False),  # faster, but not by more than a busy machine may make of it
        ([[1.8], [2.2], [1.7]], 1.7, 3, False),  # slower, but no busy minute is to decide for ever
        ([[30.0], [31.0]], 30.0, 2, True),
        ([[30.0], [3.0], [0.5]], 0.5, 3, True),
    ],
)
def test_what_seems_slower_is_timed_again_and_the_best_is_believed(
    folder: Path, tries: list[list[float]], best: float, timed: int, kept: bool
) -> None:
    clock = Clock(*tries)
    assert compared(named("a"), PLAIN, CPU, clock) == [(best, 1.0)]
    assert len(clock.asked) == timed <= TRIES
    assert any(folder.glob("*.json")) is kept or json.loads(next(folder.glob("*.json")).read_text())["verdicts"] == {}
    if kept:
        assert compared(named("a"), PLAIN, CPU, Clock()) == [(best, 1.0)]


def test_only_what_seems_slower_is_timed_again():
    clock = Clock([0.2, 5.0], [5.0])
    compared(named("a", "b"), PLAIN, CPU, clock)
    assert clock.asked == [[b"a", b"b", b"plain"], [b"b", b"plain"]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"format": 0, "verdicts": {}}',
        '{"format": 1, "seconds": {"a beside plain": [0.2, 1]}}',
        '{"format": 2, "verdicts": {"a beside plain": [0, 1, 1e9, true]}}',
        '{"format": 2, "verdicts": {"a beside plain": [0.2, 1]}}',
        "[" * 9999,
    ],
)
def test_a_damaged_file_counts_for_nothing(folder: Path, text: str) -> None:
    compared(named("a"), PLAIN, CPU, Clock([0.2]))
    (path,) = folder.glob("*.json")
    path.write_text(text)
    assert compared(named("a"), PLAIN, CPU, Clock([0.7])) == [(0.7, 1.0)]
    assert json.loads(path.read_text())["verdicts"]["a beside plain"][:2] == [0.7, 1.0]


def test_it_is_kept_in_memory_where_nothing_is_to_be_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CACHE_DIR", "")
    compared(named("a"), PLAIN, CPU, Clock([0.2]))
    assert compared(named("a"), PLAIN, CPU, Clock()) == [(0.2, 1.0)]


HOUR = 3600.0


@pytest.fixture(params=["on disk", "in memory"])
def at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock of the machine, in hours since the first timing."""
    if request.param == "in memory":
        monkeypatch.setenv("PARTITA_CACHE_DIR", "")
    return lambda hours: monkeypatch.setattr(time, "time", lambda: 1e9 + hours * HOUR)


def test_a_verdict_is_timed_again_after_a_day_and_once_it_is_confirmed_after_a_month(at: Callable[[float], None]):
    at(0)
    compared(named("a"), PLAIN, CPU, Clock([30.0], [30.0]))
    at(23)
    assert compared(named("a"), PLAIN, CPU, Clock()) == [(30.0, 1.0)]
    at(25)
    assert compared(named("a"), PLAIN, CPU, Clock([20.0], [21.0])) == [(20.0, 1.0)], "it is slower still"
    at(25 + 29 * 24)
    assert compared(named("a"), PLAIN, CPU, Clock()) == [(20.0, 1.0)]
    at(25 + 31 * 24)
    assert compared(named("a"), PLAIN, CPU, Clock([0.3])) == [(0.3, 1.0)]
    at(25 + 33 * 24)
    assert compared(named("a"), PLAIN, CPU, Clock([0.4])) == [(0.4, 1.0)], "it was said once only"


def test_what_turns_out_to_be_near_the_limit_is_forgotten(at: Callable[[float], None]):
    at(0)
    compared(named("a"), PLAIN, CPU, Clock([0.2]))
    at(25)
    compared(named("a"), PLAIN, CPU, Clock([0.9]))
    assert compared(named("a"), PLAIN, CPU, Clock([0.5])) == [(0.5, 1.0)]


def test_a_verdict_of_the_future_counts_for_nothing(at: Callable[[float], None]):
    at(1)
    compared(named("a"), PLAIN, CPU, Clock([0.2]))
    at(0)
    assert compared(named("a"), PLAIN, CPU, Clock([0.5])) == [(0.5, 1.0)]


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
