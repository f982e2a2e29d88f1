"""Each graph pass leaves what a graph computes as it was: the graph before and after it gets the same random input."""

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
from partita.export.passes import ORDER, rotary_tables, transposed_weights
from partita.export.passes.base import Pass, PassContext
from partita.export.passes.manager import run as run_passes
from partita.export.trace.ports import TraceSpec
from partita.export.weights.sources import checkpoint_weight
from partita.package.contract import Port
from tests.conftest import TinyCheckpoint

Feed = dict[str, npt.NDArray[Any]]
NOTHING_KNOWN = PassContext((), (), (), TraceSpec(1, 8, None, 21, "contrib"))
"""Of a graph without ports that have a role, and without states."""
HEAD = "model.embed_tokens.weight"  # [288, 64]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Checkpoint:
    return open_checkpoint(str(tiny_checkpoint("llama", tied=True)))


def value(name: str, shape: list[int | str], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def weight(checkpoint: Checkpoint, source: str) -> ir.Value:
    tensor = checkpoint_weight(checkpoint, source, ir.DataType.FLOAT)
    return ir.Value(name=source, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)


def constant(name: str, values: list[int]) -> ir.Value:
    tensor = ir.tensor(np.array(values, np.int64), name=name)
    return ir.Value(name=name, shape=ir.Shape([len(values)]), type=ir.TensorType(tensor.dtype), const_value=tensor)


def graph(inputs: list[ir.Value], nodes: list[ir.Node], initializers: list[ir.Value]) -> ir.Model:
    outputs = [nodes[-1].outputs[0]]
    outputs[0].name, outputs[0].type = "out", ir.TensorType(ir.DataType.FLOAT)
    made = ir.Graph(inputs, outputs, nodes=nodes, initializers=initializers, opset_imports={"": 21}, name="g")
    return ir.Model(made, ir_version=10)


def run(model: ir.Model, tmp_path: Path, feed: Feed) -> npt.NDArray[np.float32]:
    path = tmp_path / "graph.onnx"
    ir.save(model, path)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0])


def check_equal(
    make: Callable[[], ir.Model], tested: Pass, tmp_path: Path, feed: Feed, context: PassContext | None = None
) -> ir.Model:
    """The pass changes one place and no value, and keeps what passes promise; returns the rewritten model."""
    before = run(make(), tmp_path, feed)
    model = make()
    assert run_passes(model, [tested], context or NOTHING_KNOWN) == {tested.name: 1}
    np.testing.assert_allclose(run(model, tmp_path, feed), before, rtol=1e-5, atol=1e-6)
    return model


def random(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_transposed_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = "model.layers.0.mlp.up_proj.weight"  # [96, 64]

    def make() -> ir.Model:
        x, w = value("x", [1, "s", 64]), weight(checkpoint, source)
        turn = ir.node("Transpose", [w], {"perm": [1, 0]})
        return graph([x], [turn, ir.node("MatMul", [x, turn.outputs[0]])], [w])

    model = check_equal(make, transposed_weights.PASS, tmp_path, {"x": random(1, 3, 64)})
    assert [n.op_type for n in model.graph] == ["MatMul"]
    assert list(model.graph.initializers) == [f"{source}.transposed"]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_tied_head_is_a_gemm_over_the_embedding(checkpoint: Checkpoint, tmp_path: Path, batch: int) -> None:
    def make() -> ir.Model:
        ids, x = value("ids", [batch, "k"], ir.DataType.INT64), value("x", [batch, "k", 64])
        w = weight(checkpoint, HEAD)
        embed, turn = ir.node("Gather", [w, ids]), ir.node("Transpose", [w], {"perm": [1, 0]})
        hidden = ir.node("Add", [x, embed.outputs[0]])
        hidden.outputs[0].shape, hidden.outputs[0].type = x.shape, x.type
        return graph([ids, x], [embed, hidden, turn, ir.node("MatMul", [hidden.outputs[0], turn.outputs[0]])], [w])

    feed: Feed = {"ids": np.zeros((batch, 2), np.int64), "x": random(batch, 2, 64)}
    model = check_equal(make, transposed_weights.PASS, tmp_path, feed)
    assert [n.op_type for n in model.graph] == ["Gather", "Add", "Reshape", "Gemm", "Reshape"]
    assert HEAD in model.graph.initializers


LENGTH = 32
POSITIONS = replace(
    NOTHING_KNOWN,
    inputs=(Port(name="where", role="positions", shape=(1, "s"), dtype="int32"),),
    spec=replace(NOTHING_KNOWN.spec, max_length=LENGTH),
)
"""A graph whose positions are called otherwise than the exporter calls them: passes go by roles."""


def rotary(batch: int = 1, *, scaling: ir.Value | None = None, wave: str = "Cos") -> ir.Model:
    """positions [B, s] -> cos [B, s, 4], added to x so that something reads it."""
    positions, x = value("where", [batch, "s"], ir.DataType.INT32), value("x", [batch, "s", 4])
    axis, frequencies = constant("axis", [-1]), floats("frequencies", [1.0, 0.1])
    scaling = scaling or floats("scaling", [1.5])
    column = ir.node("Unsqueeze", [positions, axis])
    real = ir.node("Cast", [column.outputs[0]], {"to": ir.DataType.FLOAT})
    angle = ir.node("Mul", [real.outputs[0], frequencies])
    both = ir.node("Concat", [angle.outputs[0], angle.outputs[0]], {"axis": -1})
    turned = ir.node(wave, [both.outputs[0]])
    scaled = ir.node("Mul", [turned.outputs[0], scaling])
    scaled.outputs[0].shape, scaled.outputs[0].type = ir.Shape([batch, "s", 4]), ir.TensorType(ir.DataType.FLOAT)
    turned.outputs[0].shape, turned.outputs[0].type = ir.Shape([batch, "s", 4]), ir.TensorType(ir.DataType.FLOAT)
    nodes = [column, real, angle, both, turned, scaled, ir.node("Add", [scaled.outputs[0], x])]
    for number, node in enumerate(nodes[:-1]):
        node.outputs[0].name = f"v{number}"
    return graph([positions, x], nodes, [axis, frequencies, scaling])


def floats(name: str, values: Any) -> ir.Value:
    tensor = ir.tensor(np.array(values, np.float32), name=name)
    shape = ir.Shape(np.shape(values))
    return ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)


@pytest.mark.parametrize("wave", ["Cos", "Sin"])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary_tables(tmp_path: Path, batch: int, wave: str) -> None:
    numbers = np.stack([np.array([row, 5, LENGTH - 1, 0], np.int32) for row in range(batch)])
    feed: Feed = {"where": numbers, "x": random(batch, 4, 4)}
    model = check_equal(lambda: rotary(batch, wave=wave), rotary_tables.PASS, tmp_path, feed, POSITIONS)
    assert [n.op_type for n in model.graph] == ["Gather", "Add"]
    (table,) = model.graph.initializers.values()
    assert table.shape == ir.Shape([LENGTH, 4])


def test_rotary_tables_leaves_what_is_more_than_a_row_per_position(checkpoint: Checkpoint) -> None:
    per_column = rotary(scaling=floats("scaling", np.ones((1, 3, 4))))  # a factor for each place in the step
    assert rotary_tables.run(per_column, POSITIONS) == 1, "the wave is looked up, the factor stays"
    assert [n.op_type for n in per_column.graph] == ["Gather", "Mul", "Add"]
    learned = weight(checkpoint, "model.norm.weight")
    assert rotary_tables.run(rotary(scaling=learned), POSITIONS) == 1, "nor is a weight of the checkpoint read"


def three_rows(length: int | str = "s", batch: int = 1, *, places: bool = False) -> ir.Model:
    """cos [B, s, 6] of positions that are written three times; each part of the frequencies has one of the three.

    `places`: it depends on where in the step a position is, too.
    """
    positions, x = value("where", [batch, length], ir.DataType.INT32), value("x", [batch, length, 6])
    known = [constant("first", [0]), constant("last", [-1]), constant("sizes", [1, 1, 1])]
    first, last, sizes = known
    nodes: list[ir.Node] = []

    def op(operator: str, *inputs: ir.Value, outputs: int = 1, **attributes: int) -> ir.Node:
        nodes.append(ir.node(operator, list(inputs), attributes, num_outputs=outputs))
        return nodes[-1]

    if isinstance(length, int):
        known.append(constant("written", [3, batch, length]))
        target = known[-1]
    else:
        known.append(constant("three", [3]))
        target = op("Concat", known[-1], op("Shape", positions).outputs[0], axis=0).outputs[0]
    wide = op("Expand", op("Unsqueeze", positions, first).outputs[0], target)
    real = op("Cast", op("Unsqueeze", wide.outputs[0], last).outputs[0], to=ir.DataType.FLOAT)
    known.append(floats("frequencies", [1.0, 0.3, 0.1]))
    angle = op("Mul", real.outputs[0], known[-1])
    known.append(floats("factor", np.arange(4).reshape(1, 1, 4, 1) if places else [1.0]))
    wave = op("Cos", op("Mul", angle.outputs[0], known[-1]).outputs[0])
    parts = op("Split", wave.outputs[0], sizes, outputs=3, axis=3)
    taken = []
    for row, part in enumerate(parts.outputs):
        index = ir.tensor(np.array(row, np.int64), name=f"row{row}")
        known.append(ir.Value(name=index.name, shape=ir.Shape([]), type=ir.TensorType(index.dtype), const_value=index))
        taken.append(op("Gather", part, known[-1], axis=0).outputs[0])
    half = op("Concat", *taken, axis=-1).outputs[0]
    both = op("Concat", half, half, axis=-1).outputs[0]
    for each, size in ((half, 3), (both, 6)):
        each.shape, each.type = ir.Shape([batch, length, size]), ir.TensorType(ir.DataType.FLOAT)
    for number, out in enumerate([out for node in nodes for out in node.outputs]):
        out.name = f"v{number}"
    op("Add", both, x)
    return graph([positions, x], nodes, known)


@pytest.mark.parametrize(("length", "batch"), [("s", 1), ("s", 2), (4, 1), (4, 2)])
def test_rotary_tables_of_positions_in_three_rows(tmp_path: Path, length: int | str, batch: int) -> None:
    """Also where the number of positions is written into the graph: the table is made in steps of so many."""
    feed: Feed = {"where": np.array([[3, 5, LENGTH - 1, 0]] * batch, np.int32), "x": random(batch, 4, 6)}
    told = replace(POSITIONS, inputs=(Port(name="where", role="positions", shape=(batch, length), dtype="int32"),))
    model = check_equal(lambda: three_rows(length, batch), rotary_tables.PASS, tmp_path, feed, told)
    assert [n.op_type for n in model.graph] == ["Gather", "Add"]


def test_rotary_tables_leaves_what_depends_on_the_place_in_a_step() -> None:
    model = three_rows(4, places=True)
    told = replace(POSITIONS, inputs=(Port(name="where", role="positions", shape=(1, 4), dtype="int32"),))
    assert rotary_tables.run(model, told) == 0
    assert "Cos" in [node.op_type for node in model.graph]


def test_every_pass_has_a_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    tested |= {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert {each.name for each in ORDER} <= tested
