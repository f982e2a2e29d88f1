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

from partita.export.checkpoint.description import Checkpoint, open_checkpoint
from partita.export.passes import ORDER, rotary_tables, transposed_weights, views, write_after_read
from partita.export.passes.base import TracedGraph
from partita.export.trace.ports import TraceSpec
from partita.export.weights.sources import checkpoint_weight
from partita.package.contract import Port, State
from tests.conftest import TinyCheckpoint
from tests.export.nets import EMPTY, LENGTH, Net, context, left_alone, operators, random, rewritten, run_passes

NOTHING_KNOWN = TracedGraph(EMPTY, (), (), (), TraceSpec(1, 8, None, 21, "contrib"))
"""Of a graph without ports that have a role, and without states."""
HEAD = "model.embed_tokens.weight"  # [288, 64]
FLOAT = ir.DataType.FLOAT


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Checkpoint:
    return open_checkpoint(str(tiny_checkpoint("llama", tied=True)))


def value(name: str, shape: list[int | str], dtype: ir.DataType = FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def graph(inputs: list[ir.Value], nodes: list[ir.Node], initializers: list[ir.Value]) -> ir.Model:
    outputs = [nodes[-1].outputs[0]]
    outputs[0].name, outputs[0].type = "out", ir.TensorType(FLOAT)
    made = ir.Graph(inputs, outputs, nodes=nodes, initializers=initializers, opset_imports={"": 21}, name="g")
    return ir.Model(made, ir_version=10)


def test_transpose_is_folded_into_stored_weight(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = "model.layers.0.mlp.up_proj.weight"  # [96, 64]

    def make() -> Net:
        net = Net()
        turned = net.op("Transpose", net.weight(checkpoint_weight(checkpoint, source, FLOAT)), perm=[1, 0])
        net.give(net.op("MatMul", net.input("x", [1, "s", 64]), turned))
        return net

    model = rewritten(make, transposed_weights.PASS, tmp_path, {"x": random(1, 3, 64)}, NOTHING_KNOWN)
    assert operators(model) == ["MatMul"]
    assert list(model.graph.initializers) == [f"{source}.transposed"]


@pytest.mark.parametrize("batch", [1, 3])
def test_tied_head_becomes_gemm_over_embedding(checkpoint: Checkpoint, tmp_path: Path, batch: int) -> None:
    def make() -> Net:
        net = Net()
        table = net.weight(checkpoint_weight(checkpoint, HEAD, FLOAT))
        embedded = net.op("Gather", table, net.input("ids", [batch, "k"], ir.DataType.INT64))
        hidden = net.op("Add", net.input("x", [batch, "k", 64]), embedded)
        net.give(net.op("MatMul", hidden, net.op("Transpose", table, perm=[1, 0])))
        return net

    feed: dict[str, Any] = {"ids": np.zeros((batch, 2), np.int64), "x": random(batch, 2, 64)}
    model = rewritten(make, transposed_weights.PASS, tmp_path, feed, NOTHING_KNOWN)
    assert operators(model) == ["Gather", "Add", "Reshape", "Gemm", "Reshape"]
    assert HEAD in model.graph.initializers


def told(batch: int = 1, length: int | str = "s") -> TracedGraph:
    """A graph whose positions are called otherwise than the exporter calls them: passes go by roles."""
    ports = (Port(name="where", role="positions", shape=(batch, length), dtype="int32"),)
    return replace(context("none"), inputs=ports)


def rotary(batch: int = 1, scaling: Callable[[Net], ir.Value] | None = None, wave: str = "Cos") -> Net:
    """positions [B, s] -> cos [B, s, 4], added to x so that something reads it."""
    net = Net()
    column = net.op("Unsqueeze", net.input("where", [batch, "s"], ir.DataType.INT32), net.constant([-1], np.int64))
    angle = net.op("Mul", net.op("Cast", column, to=FLOAT), net.constant([1.0, 0.1]))
    turned = net.op(wave, net.op("Concat", angle, angle, axis=-1))
    scaled = net.op("Mul", turned, net.constant([1.5]) if scaling is None else scaling(net))
    net.give(net.op("Add", scaled, net.input("x", [batch, "s", 4])))
    return net


@pytest.mark.parametrize("wave", ["Cos", "Sin"])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary_waves_become_table_lookup(tmp_path: Path, batch: int, wave: str) -> None:
    numbers = np.stack([np.array([row, 5, LENGTH - 1, 0], np.int32) for row in range(batch)])
    feed: dict[str, Any] = {"where": numbers, "x": random(batch, 4, 4)}
    model = rewritten(lambda: rotary(batch, wave=wave), rotary_tables.PASS, tmp_path, feed, told(batch))
    assert operators(model) == ["Gather", "Add"]
    (table,) = model.graph.initializers.values()
    assert table.shape == ir.Shape([LENGTH, 4])


def test_rotary_tables_excludes_factors_and_learned_weights(checkpoint: Checkpoint) -> None:
    per_column = rotary(scaling=lambda net: net.constant(np.ones((1, 3, 4)))).model()  # a factor for each place
    assert run_passes(per_column, [rotary_tables.PASS], told()) == {"rotary_tables": 1}, (
        "the wave is looked up, the factor stays"
    )
    assert operators(per_column) == ["Gather", "Mul", "Add"]
    norm = checkpoint_weight(checkpoint, "model.norm.weight", FLOAT).reshaped((16, 4))
    learned = rotary(scaling=lambda net: net.op("Slice", net.weight(norm), *map(net.numbers, ([0], [1], [0])))).model()
    assert run_passes(learned, [rotary_tables.PASS], told()) == {"rotary_tables": 1}, (
        "nor is a weight of the checkpoint read"
    )


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


def test_every_pass_has_a_test() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    untested = [
        each.name for each in ORDER if f"passes.{each.name} import" not in text and f"{each.name}.PASS" not in text
    ]
    assert not untested


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


def test_view_with_another_reader_is_not_removed(tmp_path: Path) -> None:
    def make() -> Net:
        made = Net()
        split = made.op("Reshape", made.input("x", [2, "s", 12]), made.constant([2, -1, 3, 4], np.int64))
        made.give(made.op("Neg", split), "middle")
        made.give(made.op("Abs", made.op("Reshape", split, made.constant([2, -1, 12], np.int64))))
        return made

    assert operators(rewritten(make, views.PASS, tmp_path, VIEWED, context("none"))) == ["Reshape", "Neg", "Abs"]


PAST, PRESENT = "before", "after"

STATE = State(past=PAST, present=PRESENT, layer=0, kind="recurrent", shape=(2, 3), dtype="float32")
STATES = replace(NOTHING_KNOWN, states=(STATE,))


def finished(net: Net, out: ir.Value, present: ir.Value) -> ir.Model:
    """The graph with these two outputs, whose nodes give them under their names."""
    out.name, present.name = "out", PRESENT
    out.type = present.type = ir.TensorType(ir.DataType.FLOAT)
    net.outputs += [out, present]
    return net.model()


def model(reader_first: bool, view: str | None = None) -> ir.Model:
    """present = past + new; out = past * (new + new), which no one needs before `present`; perhaps through a view."""
    net = Net(17)
    past, new = net.input(PAST, [2, 3]), net.input("new", [2, 3])
    seen = net.op(view, past) if view else past
    out = net.op("Mul", seen, net.op("Add", new, new))
    return finished(net, out, net.op("Sub", out if reader_first else past, new))  # ONNX Runtime runs the last first


def turned() -> ir.Model:
    """ONNX Runtime makes the Transpose a part of the product, which then reads the state itself."""
    net = Net(17)
    past, new = net.input(PAST, [2, 3]), net.input("new", [2, 3])
    turned = net.op("Transpose", past, perm=[1, 0])
    out = net.op("Neg", net.op("MatMul", net.op("Add", new, new), turned))
    return finished(net, out, net.op("Sub", past, new))


def run_in_place(
    made: ir.Model, level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
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


@pytest.mark.parametrize("view", [None, "Identity"])
def test_state_write_waits_for_late_reader(view: str | None) -> None:
    wrong, _ = run_in_place(model(reader_first=False, view=view))
    past = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert not np.array_equal(wrong, past * 4), "ONNX Runtime does not overwrite it: the case shows nothing"
    made = model(reader_first=False, view=view)
    assert run_passes(made, [write_after_read.PASS], STATES) == {"write_after_read": 1}
    producer = made.graph.outputs[1].producer()
    assert producer is not None and made.graph.outputs[1].name == PRESENT
    before = {node.op_type for node in write_after_read.upstream(producer)}
    assert {"Sub", "Mul"} <= before, "the node that writes has the other reader upstream, not just a view"
    out, written = run_in_place(made)
    assert np.array_equal(out, past * 4) and np.array_equal(written, past - 2)


def test_state_write_waits_for_reader_moved_by_fusion() -> None:
    wanted = np.full((2, 3), -4, np.float32) @ np.arange(6, dtype=np.float32).reshape(2, 3).T
    wrong, _ = run_in_place(turned(), ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    assert not np.array_equal(wrong, wanted), "ONNX Runtime does not overwrite it: the case shows nothing"
    made = turned()
    assert run_passes(made, [write_after_read.PASS], STATES) == {"write_after_read": 1}
    out, _ = run_in_place(made, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    assert np.array_equal(out, wanted)


def test_reader_upstream_of_state_write_needs_no_change() -> None:
    assert run_passes(model(reader_first=True), [write_after_read.PASS], STATES) == {"write_after_read": 0}
