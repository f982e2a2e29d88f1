"""Look up cosines and sines of the rotary embedding instead of computing them.

    positions [B, S] ─ Unsqueeze ─ Cast ─ Mul(frequencies) ─ Concat ─ Cos ─ Mul(scaling) ─ cos [B, S, D]    before
    table [N, D] ─ Gather(positions) ─ cos [B, S, D]                                                        after

    positions ─ Expand [3, B, S] ─ ... ─ Cos ─ Split ─ Gather (a row for each part) ─ Concat ─ cos [B, S, D]     before
    table [N, D] ─ Gather(positions) ─ cos [B, S, D]                                                        after

The second form is that of vision-language models, whose three position rows are equal for text.

A table has one row for each of the N positions. Providers differ in the precision of Cos and Sin: SwiftShader is off
by 2e-4 at positions up to 11. Both tables have the size of the keys and values of one KV head in one layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from partita.export.passes.base import Pass, PassContext, over
from partita.export.passes.rewriting import drop_unused_initializers, stand_in
from partita.export.weights.sources import stored

WAVES = frozenset({"Cos", "Sin"})
MOVES = frozenset(
    {
        "Concat",
        "Expand",
        "Gather",
        "Identity",
        "Range",
        "Reshape",
        "ScatterElements",
        "ScatterND",
        "Shape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
BEFORE = MOVES | {"Cast", "MatMul", "Mul"}
AFTER = MOVES | {"Cast", "Mul"}
"""Operators between the positions and a wave, and behind one."""
UNFIT = (IndexError, RuntimeError, TypeError, ValueError)
"""What the reference evaluator raises for sizes that do not fit each other."""
TOLERANCE = 1e-6
MOST_RUNS = 1 << 12
"""Of a graph whose number of positions is written into it: with more, a table would take minutes."""


class ScatterElements(OpRun):
    """Numbers put in places along an axis at once: onnx's own takes them one by one, minutes for a long table."""

    op_domain = ""

    def _run(
        self,
        data: npt.NDArray[Any],
        indices: npt.NDArray[Any],
        updates: npt.NDArray[Any],
        axis: int | None = None,
        reduction: str | None = None,
    ) -> tuple[npt.NDArray[Any]]:
        if reduction not in (None, "none"):
            raise ValueError(f"reduction {reduction}")
        along = (axis or 0) % data.ndim
        result = data.copy()
        part = result[tuple(slice(None if i == along else size) for i, size in enumerate(indices.shape))]
        np.put_along_axis(part, indices, updates, along)
        return (result,)


def run(model: ir.Model, context: PassContext) -> int:
    """Replace every value that is a wave of the positions; returns how many."""
    graph, positions = model.graph, context.input(model.graph, "positions")
    if positions is None or any(state.grows is not None for state in context.states):
        return 0  # whoever feeds a cache that grows may go beyond N, and a table ends there
    found: list[tuple[ir.Value, npt.NDArray[Any]]] = []
    covered = set[ir.Value]()
    for value in reversed(_waves(graph, positions)):
        readers = [use.node.outputs for use in value.uses()]
        if _is_row(value, positions) and any(covered.isdisjoint(each) for each in readers):
            table = _tabulated(model, positions, value, context.spec.max_length)
            if table is not None:
                found.append((value, table))
                covered.add(value)
        if any(not covered.isdisjoint(each) for each in readers):
            covered.add(value)  # what it is read for is looked up
    for value, table in reversed(found):
        _look_up(graph, positions, value, table)
    drop_unused_initializers(graph)
    return len(found)


def _waves(graph: ir.Graph, positions: ir.Value) -> list[ir.Value]:
    """Values that depend on nothing but the positions, through a wave, in the order of the graph."""
    before, after = {positions}, set[ir.Value]()
    for node in graph:
        moving = [value for value in node.inputs if value is not None and not _is_constant(value)]
        if not moving or node.domain:
            continue
        if node.op_type in WAVES and before.issuperset(moving):
            after.update(node.outputs)
        elif node.op_type in BEFORE and before.issuperset(moving):
            before.update(node.outputs)
        elif node.op_type in AFTER and (before | after).issuperset(moving) and not after.isdisjoint(moving):
            after.update(node.outputs)
    return [value for node in graph for value in node.outputs if value in after]


def _is_constant(value: ir.Value) -> bool:
    """True for a value that is known now; weights of the checkpoint are not read."""
    return value.const_value is not None and stored(value) is None


def _is_row(value: ir.Value, positions: ir.Value) -> bool:
    """True for [B, S, D]: a row of known size for each position, which is no output of the graph."""
    shape, wanted = value.shape, positions.shape
    if shape is None or wanted is None or shape.rank() != 3 or not isinstance(shape[2], int):
        return False
    if value.is_graph_output():
        return False
    return [str(size) for size in (shape[0], shape[1])] == [str(size) for size in (wanted[0], wanted[1])]


def _tabulated(model: ir.Model, positions: ir.Value, value: ir.Value, length: int) -> npt.NDArray[Any] | None:
    """The rows [N, D] of `value` for every position; None when a row depends on more than its position."""
    assert positions.dtype is not None
    maker = value.producer()
    assert maker is not None
    with over(maker):
        compute = ReferenceEvaluator(_cut(model, positions, value), new_ops=[ScatterElements])
        return _rows_of(compute, positions, length)


def _rows_of(compute: ReferenceEvaluator, positions: ir.Value, length: int) -> npt.NDArray[Any] | None:
    """What a model of one output gives for every position; None when that is not one row for each."""
    numbers = np.arange(length)
    table = _rows_at(compute, positions, numbers)
    drawn = np.random.default_rng(0).permutation(length)[: -(-length // 2)]
    for others in (numbers[::-1], drawn):
        rows = None if table is None else _rows_at(compute, positions, others)
        if table is None or rows is None or not _are_equal(rows, table[others]):
            return None
    return None if table is None else np.ascontiguousarray(table)


def _are_equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether rows are the same but for the last bit, which goes with how many are computed at once."""
    return one.shape == other.shape and bool(np.abs(one - other).max(initial=0.0) <= TOLERANCE)


def _rows_at(compute: ReferenceEvaluator, positions: ir.Value, numbers: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """The rows [K, D] that a model of one output gives for the positions `numbers` [K]: at once, or as many in a run as
    the graph has where that number is written into it. None where neither works.
    """
    assert positions.shape is not None
    batch, size = positions.shape
    ways = [(1, len(numbers))]  # one row of the batch: the others are the same
    if isinstance(batch, int) and isinstance(size, int) and len(numbers) <= size * MOST_RUNS:
        ways.append((batch, size))
    for rows, count in ways:
        try:
            parts = [
                _run(compute, positions, numbers[start : start + count], rows, count)
                for start in range(0, len(numbers), count)
            ]
        except UNFIT:
            continue
        return np.concatenate(parts)
    return None


def _run(
    compute: ReferenceEvaluator, positions: ir.Value, numbers: npt.NDArray[Any], rows: int, count: int
) -> npt.NDArray[Any]:
    """What a model of one output gives for `numbers` [K], in a run of `rows` times `count` positions, K of which count.

    Raises ValueError when that is not one row for each, the same in all of the batch.
    """
    assert positions.dtype is not None
    fed = np.resize(numbers, count).astype(positions.dtype.numpy())
    found = np.asarray(_outputs(compute, {positions.name or "": np.broadcast_to(fed, (rows, count)).copy()}))
    if found.ndim != 3 or found.shape[1] != count or (found != found[:1]).any():
        raise ValueError(f"{found.shape} for {count} positions")
    return np.asarray(found[0, : len(numbers)])


def _outputs(compute: ReferenceEvaluator, feed: dict[str, npt.NDArray[Any]]) -> Any:
    """What a model of one output gives for positions."""
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
    name = f"{value.name}.table"
    tensor = ir.tensor(rows, name=name)
    table = ir.Value(name=name, shape=ir.Shape(rows.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.initializers[name] = table
    new = ir.node("Gather", inputs=[table, positions], attributes={"axis": 0})
    stand_in(graph, value, new)


PASS = Pass("rotary_tables", run)
