"""Passes preserve values: weight layout, rotary tables, views and states read before they are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from partita.export.checkpoint.description import Checkpoint
from partita.export.passes import rotary_tables, transposed_weights, views, write_after_read
from partita.export.passes.base import TracedGraph
from partita.export.weights.sources import StoredPart
from partita.package.contract import Port, State
from tests.export.nets import LENGTH, Net, context, float_source, left_alone, operators, random, rewritten, run_passes

HEAD = "model.embed_tokens.weight"  # [288, 64]
FLOAT = ir.DataType.FLOAT


@pytest.mark.parametrize("batch", [1, 3])
def test_tied_head_becomes_gemm_over_embedding(opened: Checkpoint, tmp_path: Path, batch: int) -> None:
    def make() -> Net:
        net = Net()
        table = net.weight(StoredPart(float_source(opened, HEAD)))
        embedded = net.op("Gather", table, net.input("ids", [batch, "k"], ir.DataType.INT64))
        hidden = net.op("Add", net.input("x", [batch, "k", 64]), embedded)
        net.give(net.op("MatMul", hidden, net.op("Transpose", table, perm=[1, 0])))
        return net

    feed: dict[str, Any] = {"ids": np.zeros((batch, 2), np.int64), "x": random(batch, 2, 64)}
    model = rewritten(make, transposed_weights.PASS, tmp_path, feed, context("none"))
    assert operators(model) == ["Gather", "Add", "Reshape", "Gemm", "Reshape"]
    assert HEAD in model.graph.initializers


def told(batch: int = 1, length: int | str = "s") -> TracedGraph:
    """A graph whose positions are called otherwise than the exporter calls them: passes go by roles."""
    ports = (Port(name="where", role="positions", shape=(batch, length), dtype="int32"),)
    return replace(context("none"), inputs=ports)


def rotary(scaling: Callable[[Net], ir.Value]) -> Net:
    """positions [1, s] -> cos [1, s, 4] times a factor, added to x so that something reads it."""
    net = Net()
    column = net.op("Unsqueeze", net.input("where", [1, "s"], ir.DataType.INT32), net.constant([-1], np.int64))
    angle = net.op("Mul", net.op("Cast", column, to=FLOAT), net.constant([1.0, 0.1]))
    turned = net.op("Sin", net.op("Concat", angle, angle, axis=-1))
    net.give(net.op("Add", net.op("Mul", turned, scaling(net)), net.input("x", [1, "s", 4])))
    return net


def test_rotary_waves_become_table_lookup(opened: Checkpoint, tmp_path: Path) -> None:
    """A factor for each place in the step and a weight of the checkpoint stay."""
    norm = StoredPart(float_source(opened, "model.norm.weight")).reshaped((16, 4))
    feed: dict[str, Any] = {"where": np.array([[3, 5, LENGTH - 1, 0]], np.int32), "x": random(1, 4, 4)}
    model = rewritten(lambda: rotary(lambda net: net.constant([1.5])), rotary_tables.PASS, tmp_path, feed, told())
    assert operators(model) == ["Gather", "Add"]
    (table,) = model.graph.initializers.values()
    assert table.shape == ir.Shape([LENGTH, 4])
    for scaling, left in (
        (lambda net: net.constant(np.ones((1, 3, 4))), ["Add", "Gather", "Mul"]),
        (
            lambda net: net.op("Slice", net.weight(norm), *map(net.numbers, ([0], [1], [0]))),
            ["Add", "Gather", "Mul", "Slice"],
        ),
    ):
        model = rotary(scaling).model()
        assert run_passes(model, [rotary_tables.PASS], told()) == {"rotary_tables": 1}
        assert sorted(operators(model)) == left


def three_rows(length: int | str = "s", batch: int = 1, *, places: bool = False) -> Net:
    """cos [B, s, 6] of positions that are written three times; each part of the frequencies has one of the three.

    `places`: it depends on where in the step a position is, too.
    """
    net = Net()
    positions = net.input("where", [batch, length], ir.DataType.INT32)
    if isinstance(length, int):
        target = net.numbers([3, batch, length])
    else:
        target = net.op("Concat", net.numbers([3]), net.op("Shape", positions), axis=0)
    wide = net.op("Expand", net.op("Unsqueeze", positions, net.numbers([0])), target)
    real = net.op("Cast", net.op("Unsqueeze", wide, net.numbers([-1])), to=FLOAT)
    angle = net.op("Mul", real, net.constant([1.0, 0.3, 0.1]))
    wave = net.op("Cos", net.op("Mul", angle, net.constant(np.arange(4).reshape(1, 1, 4, 1) if places else [1.0])))
    parts = net.op("Split", wave, net.numbers([1, 1, 1]), outputs=3, axis=3)
    rows = [net.op("Gather", part, net.constant(row, np.int64), axis=0) for row, part in enumerate(parts)]
    half = net.op("Concat", *rows, axis=-1)
    both = net.op("Concat", half, half, axis=-1)
    for each, size in ((half, 3), (both, 6)):
        each.shape, each.type = ir.Shape([batch, length, size]), ir.TensorType(FLOAT)
    net.give(net.op("Add", both, net.input("x", [batch, length, 6])))
    return net


@pytest.mark.parametrize(("length", "batch"), [("s", 1), ("s", 2), (4, 1), (4, 2)])
def test_rotary_tables_support_three_rows_of_positions(tmp_path: Path, length: int | str, batch: int) -> None:
    """Also with a fixed number of positions in the graph: the table is computed in steps of that size."""
    feed: dict[str, Any] = {"where": np.array([[3, 5, LENGTH - 1, 0]] * batch, np.int32), "x": random(batch, 4, 6)}
    made = told(batch, length)
    model = rewritten(lambda: three_rows(length, batch), rotary_tables.PASS, tmp_path, feed, made)
    assert operators(model) == ["Gather", "Add"]


def test_rotary_tables_skips_waves_depending_on_place_in_step() -> None:
    model = three_rows(4, places=True).model()
    assert run_passes(model, [rotary_tables.PASS], told(1, 4)) == {"rotary_tables": 0}
    assert "Cos" in operators(model)


VIEWED = {"x": random(2, 5, 12)}


def net(*steps: tuple[str, Any]) -> Net:
    """x [2, s, 12], seen through `steps`, and read by something that is no view."""
    made = Net()
    value = made.input("x", [2, "s", 12])
    for operator, how in steps:
        if operator == "Transpose":
            value = made.op(operator, value, perm=how)
        else:
            value = made.op(operator, value, made.constant(how, np.int64))
    made.give(made.op("Neg", value))
    return made


TURN = ("Transpose", [0, 2, 1, 3])
CHAINS = [
    ((("Reshape", [2, -1, 3, 4]), ("Reshape", [2, -1, 12])), []),
    ((("Reshape", [2, -1, 3, 4]), TURN, TURN, ("Reshape", [2, -1, 12])), []),
    ((("Unsqueeze", [1]), ("Squeeze", [1])), []),
    ((("Reshape", [0, 0, 12]),), []),
    ((("Reshape", [2, -1, 3, 4]), ("Reshape", [2, -1, 6, 2])), ["Reshape"]),
    ((("Reshape", [2, -1, 12, 1]), ("Transpose", [0, 1, 3, 2]), ("Reshape", [2, -1, 2, 6])), ["Reshape"]),
    ((("Unsqueeze", [0]), ("Unsqueeze", [4])), ["Reshape"]),
]


@pytest.mark.parametrize(("steps", "left"), CHAINS)
def test_chained_views_become_single_reshape_or_none(
    tmp_path: Path, steps: tuple[tuple[str, Any], ...], left: list[str]
) -> None:
    model = rewritten(lambda: net(*steps), views.PASS, tmp_path, VIEWED, context("none"))
    assert operators(model) == [*left, "Neg"]


STAYS = [
    (("Reshape", [2, -1, 3, 4]),),
    (("Transpose", [0, 2, 1]),),
    (("Reshape", [2, -1, 3, 4]), TURN, ("Reshape", [2, -1, 12])),
    # The same order for one token, and another for more.
    (("Reshape", [2, 3, -1, 4]), TURN, ("Reshape", [2, -1, 12])),
    (TURN[0:1] + ([1, 0, 2],), ("Reshape", [2, -1, 12])),
]


@pytest.mark.parametrize("steps", STAYS)
def test_necessary_reshapes_and_transposes_are_not_removed(steps: tuple[tuple[str, Any], ...]) -> None:
    left_alone(lambda: net(*steps), views.PASS, context("none"))


PAST, PRESENT = "before", "after"

STATE = State(past=PAST, present=PRESENT, layer=0, kind="recurrent", shape=(2, 3), dtype="float32")
STATES = replace(context("none"), states=(STATE,))


def model(case: str) -> ir.Model:
    """present = past - new, and an output that reads past, perhaps through a view; ONNX Runtime runs the last first."""
    net = Net(17)
    past, new = net.input(PAST, [2, 3]), net.input("new", [2, 3])
    twice = net.op("Add", new, new)
    if case == "Transpose":  # ONNX Runtime makes it a part of the product, which then reads the state itself
        out = net.op("Neg", net.op("MatMul", twice, net.op("Transpose", past, perm=[1, 0])))
    else:
        out = net.op("Mul", net.op("Identity", past) if case == "Identity" else past, twice)
    present = net.op("Sub", out if case == "reader first" else past, new)
    for each, name in ((out, "out"), (present, PRESENT)):
        each.name, each.type = name, ir.TensorType(FLOAT)
        net.outputs.append(each)
    return net.model()


def run_in_place(
    made: ir.Model, level: ort.GraphOptimizationLevel
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """`out`, and the state after a run with one buffer as past and as present."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    model_bytes = ir.to_proto(made).SerializeToString()
    session = ort.InferenceSession(model_bytes, options, providers=["CPUExecutionProvider"])
    state = np.arange(6, dtype=np.float32).reshape(2, 3)
    binding = session.io_binding()
    binding.bind_input(PAST, "cpu", 0, np.float32, [2, 3], state.ctypes.data)
    binding.bind_cpu_input("new", np.full((2, 3), 2, np.float32))
    binding.bind_output("out")
    binding.bind_output(PRESENT, "cpu", 0, np.float32, [2, 3], state.ctypes.data)
    session.run_with_iobinding(binding)
    return np.asarray(binding.get_outputs()[0].numpy()), state


@pytest.mark.parametrize("case", ["direct", "Identity", "Transpose"])
def test_state_write_waits_for_late_reader(case: str) -> None:
    """Also where ONNX Runtime moves the reader by fusion."""
    levels = ort.GraphOptimizationLevel
    level = levels.ORT_ENABLE_ALL if case == "Transpose" else levels.ORT_DISABLE_ALL
    past = np.arange(6, dtype=np.float32).reshape(2, 3)
    wanted = np.full((2, 3), -4, np.float32) @ past.T if case == "Transpose" else past * 4
    wrong, _ = run_in_place(model(case), level)
    assert not np.array_equal(wrong, wanted), "ONNX Runtime does not overwrite it: the case shows nothing"
    made = model(case)
    assert run_passes(made, [write_after_read.PASS], STATES) == {"write_after_read": 1}
    producer = made.graph.outputs[1].producer()
    assert producer is not None and made.graph.outputs[1].name == PRESENT
    before = {node.op_type for node in write_after_read.upstream(producer)}
    assert {"Sub", "MatMul" if case == "Transpose" else "Mul"} <= before, "the other reader, not just a view"
    out, written = run_in_place(made, level)
    assert np.array_equal(out, wanted) and np.array_equal(written, past - 2)


def test_reader_upstream_of_state_write_needs_no_change() -> None:
    assert run_passes(model("reader first"), [write_after_read.PASS], STATES) == {"write_after_read": 0}
