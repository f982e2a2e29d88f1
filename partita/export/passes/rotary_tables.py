"""Look up the cosines and sines of the rotary embedding in a table.

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
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from partita.export.passes.arithmetic import nodes_between
from partita.export.passes.base import Pass, TracedGraph, added, drop_unused_initializers, stand_in
from partita.export.weights.sources import weight_part

UNFIT = (IndexError, RuntimeError, TypeError, ValueError)
"""Exceptions of the reference evaluator for sizes that do not match, and for unknown operators."""
TOLERANCE = 1e-6
MOST_RUNS = 1 << 12
"""Maximum runs of a graph with a constant number of positions; more would take minutes."""


class ScatterElements(OpRun):
    """A vectorised ScatterElements: onnx's own takes minutes for a long table."""

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


def run(traced: TracedGraph) -> int:
    """Replace every value that is a cosine or sine of the positions; returns their number."""
    graph, positions = traced.graph, traced.input("positions")
    if positions is None or any(state.growing_axis is not None for state in traced.states):
        return 0  # a growing cache may exceed the N positions of a table
    found: list[tuple[ir.Value, npt.NDArray[Any]]] = []
    covered = set[ir.Node]()
    for value in reversed(_computed_from(positions, graph)):
        if not _is_row(value, positions) or all(use.node in covered for use in value.uses()):
            continue
        nodes = nodes_between({positions}, value, len(graph)) or []
        if not {"Cos", "Sin"}.isdisjoint(node.op_type for node in nodes):
            table = _tabulated(graph, positions, value, traced.spec.max_length)
            if table is not None:
                found.append((value, table))
                covered.update(nodes)
    for value, table in reversed(found):
        rows = added(graph, ir.tensor(table), f"{value.name}.table")
        stand_in(graph, value, ir.node("Gather", inputs=[rows, positions], attributes={"axis": 0}))
    drop_unused_initializers(graph)
    return len(found)


def _computed_from(positions: ir.Value, graph: ir.Graph) -> list[ir.Value]:
    """Values that depend on the positions alone, in execution order."""
    computed = {positions: None}
    for node in graph:
        values = (value for value in node.inputs if value is not None)
        moving = [value for value in values if value.const_value is None or weight_part(value) is not None]
        if moving and not node.domain and computed.keys() >= set(moving):
            computed |= dict.fromkeys(node.outputs)
    return list(computed)


def _is_row(value: ir.Value, positions: ir.Value) -> bool:
    """Whether the value is [B, S, D] with a constant D, and not a graph output."""
    shape, wanted = value.shape, positions.shape
    if shape is None or wanted is None or shape.rank() != 3 or not isinstance(shape[2], int):
        return False
    return not value.is_graph_output() and [str(size) for size in shape[:2]] == [str(size) for size in wanted]


def _tabulated(graph: ir.Graph, positions: ir.Value, value: ir.Value, length: int) -> npt.NDArray[Any] | None:
    """The rows [N, D] of `value` for every position; None where a row depends on more than its position."""
    part = ir.Model(ir.convenience.extract(graph, [positions], [value]), ir_version=10)
    compute = ReferenceEvaluator(ir.to_proto(part), new_ops=[ScatterElements])
    table = _rows_at(compute, positions, np.arange(length))
    if table is None:
        return None
    for others in (np.random.default_rng(0).permutation(length)[: -(-length // 2)], np.arange(-(-length // 64))):
        rows = _rows_at(compute, positions, others)  # the second: a short text, which some models compute otherwise
        if rows is None or rows.shape != table[others].shape:
            return None
        if float(np.abs(rows - table[others]).max(initial=0.0)) > TOLERANCE:  # rounding depends on the number of rows
            return None
    return table


def _rows_at(compute: ReferenceEvaluator, positions: ir.Value, numbers: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """The rows [K, D] of a one-output model for the positions `numbers` [K]; None where it fails."""
    assert positions.shape is not None
    batch, size = positions.shape
    ways = [(1, len(numbers))]  # one sequence: the others are the same
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
    """The output for `numbers` [K], in a run of `rows` times `count` positions. Raises ValueError for other outputs."""
    assert positions.dtype is not None
    fed = np.resize(numbers, count).astype(positions.dtype.numpy())
    outputs: Any = compute.run(None, {positions.name or "": np.broadcast_to(fed, (rows, count)).copy()})
    found = np.asarray(outputs[0])
    if found.ndim != 3 or found.shape[1] != count or (found != found[:1]).any():
        raise ValueError(f"{found.shape} for {count} positions")
    return np.asarray(found[0, : len(numbers)])


PASS = Pass("rotary_tables", run)
