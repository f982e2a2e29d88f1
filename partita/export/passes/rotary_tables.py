"""Look up cosines and sines of the rotary embedding instead of computing them.

    positions [B, S] ─ Unsqueeze ─ Cast ─ Mul(frequencies) ─ Concat ─ Cos ─ Mul(scaling) ─ cos [B, S, D]    before
    table [N, D] ─ Gather(positions) ─ cos [B, S, D]                                                        after

A position is one of 0 .. N-1, so the table holds every value there can be. Providers compute Cos and Sin as exactly as
their device does: SwiftShader was seen to be off by 2e-4 at positions up to 11, and WGSL promises nothing beyond pi.
Cosines and sines together are as large as the keys and values of one KV head in one layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from partita.export.passes.base import Pass, PassContext, over
from partita.export.passes.rewriting import drop_unused_initializers, remove_unread, replace, take_names
from partita.export.weight_sources import stored

WAVES = frozenset({"Cos", "Sin"})
BEFORE = frozenset({"Unsqueeze", "Cast", "Mul", "MatMul", "Transpose", "Concat"})
AFTER = frozenset({"Cast", "Mul", "Concat"})
"""Operators between the positions and a wave, and behind one. None has the number of positions written into it."""


def run(model: ir.Model, context: PassContext) -> int:
    """Replace every value that is a wave of the positions; returns how many."""
    graph, positions = model.graph, context.input(model.graph, "positions")
    if positions is None or any(state.grows is not None for state in context.states):
        return 0  # whoever feeds a cache that grows may go beyond N, and a table ends there
    length = context.spec.max_length
    tables = [(value, _tabulated(model, positions, value, length)) for value in _waves(graph, positions)]
    count = 0
    for value, table in tables:
        if table is not None:
            _look_up(graph, positions, value, table)
            count += 1
    drop_unused_initializers(graph)
    return count


def _waves(graph: ir.Graph, positions: ir.Value) -> list[ir.Value]:
    """Values [B, S, D] that depend on nothing but the positions, through a wave, and are read by something else."""
    before, after = {positions}, set[ir.Value]()
    for node in graph:
        moving = [value for value in node.inputs if value is not None and not _is_constant(value)]
        if not moving:
            continue
        if node.op_type in WAVES and before.issuperset(moving):
            after.update(node.outputs)
        elif node.op_type in BEFORE and before.issuperset(moving):
            before.update(node.outputs)
        elif node.op_type in AFTER and after.issuperset(moving) and _keeps_positions(node):
            after.update(node.outputs)
    return [
        value for value in _graph_order(graph, after) if _is_read_outside(value, after) and _is_row(value, positions)
    ]


def _is_constant(value: ir.Value) -> bool:
    """True for a value that is known now; weights of the checkpoint are not read."""
    return value.const_value is not None and stored(value) is None


def _keeps_positions(node: ir.Node) -> bool:
    """True when the node leaves the axis of the positions alone: factors of a scalar or the last axis, joined there."""
    if node.op_type == "Concat":
        return node.attributes.get_int("axis", 0) in (-1, 2)
    constants = [value.shape for value in node.inputs if value is not None and _is_constant(value)]
    return all(shape is not None and shape.rank() <= 1 for shape in constants)


def _graph_order(graph: ir.Graph, values: set[ir.Value]) -> list[ir.Value]:
    """The values in the order in which the graph computes them."""
    return [value for node in graph for value in node.outputs if value in values]


def _is_read_outside(value: ir.Value, values: set[ir.Value]) -> bool:
    """True when a node reads it whose result is none of `values`."""
    return any(not values.issuperset(use.node.outputs) for use in value.uses())


def _is_row(value: ir.Value, positions: ir.Value) -> bool:
    """True for [B, S, D]: a row of known size for each position."""
    shape, wanted = value.shape, positions.shape
    if shape is None or wanted is None or shape.rank() != 3 or not isinstance(shape[2], int):
        return False
    return [str(size) for size in (shape[0], shape[1])] == [str(size) for size in (wanted[0], wanted[1])]


def _tabulated(model: ir.Model, positions: ir.Value, value: ir.Value, length: int) -> npt.NDArray[Any] | None:
    """The rows [N, D] of `value` for every position; None when a row depends on more than its position."""
    assert positions.dtype is not None
    maker = value.producer()
    assert maker is not None
    with over(maker):
        compute = ReferenceEvaluator(_cut(model, positions, value))
        return _rows_of(compute, positions, length)


def _rows_of(compute: ReferenceEvaluator, positions: ir.Value, length: int) -> npt.NDArray[Any] | None:
    """What a model of one output gives for every position; None when that is not one row for each."""
    assert positions.dtype is not None
    numbers = np.arange(length, dtype=positions.dtype.numpy())[None]  # one row of the batch: the others are the same
    orders = ({positions.name or "": order} for order in (numbers, numbers[:, ::-1]))
    rows, mirrored = (np.asarray(_outputs(compute, order)) for order in orders)
    if rows.shape[1] != length or not np.array_equal(rows, mirrored[:, ::-1]) or (rows != rows[:1]).any():
        return None
    return np.ascontiguousarray(rows[0])


def _outputs(compute: ReferenceEvaluator, feed: dict[str, npt.NDArray[Any]]) -> Any:
    """What a model of one output gives for positions [B, N]."""
    return compute.run(None, feed)[0]  # type: ignore[index]  # a list, as no names are given


def _cut(model: ir.Model, positions: ir.Value, value: ir.Value) -> onnx.ModelProto:
    """What computes `value` from the positions, as a model of its own."""
    needed, wanted = [], {value}
    for node in reversed(list(model.graph)):
        if wanted.intersection(node.outputs):
            needed.append(ir.serde.serialize_node(node))
            wanted.update(v for v in node.inputs if v is not None)
    constants = [
        onnx.numpy_helper.from_array(v.const_value.numpy(), v.name) for v in wanted if v.const_value is not None
    ]
    assert positions.dtype is not None and value.dtype is not None
    graph = onnx.helper.make_graph(
        needed[::-1],
        "waves",
        [onnx.helper.make_tensor_value_info(positions.name or "", positions.dtype.value, None)],
        [onnx.helper.make_tensor_value_info(value.name or "", value.dtype.value, None)],
        constants,
    )
    opset = onnx.helper.make_opsetid("", model.opset_imports[""])
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)


def _look_up(graph: ir.Graph, positions: ir.Value, value: ir.Value, rows: npt.NDArray[Any]) -> None:
    """Put a Gather of `rows` [N, D] where `value` is computed."""
    old = value.producer()
    assert old is not None
    name = f"{value.name}.table"
    tensor = ir.tensor(rows, name=name)
    table = ir.Value(name=name, shape=ir.Shape(rows.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.initializers[name] = table
    new = ir.node("Gather", inputs=[table, positions], attributes={"axis": 0})
    take_names(new, old)
    before = [v.producer() for v in old.inputs if v is not None]
    replace(graph, old, new)
    remove_unread(graph, before)


PASS = Pass("rotary_tables", run)
