"""One operator for a rotary embedding, where attention does not turn queries and keys itself.

    x [B, H, S, D] ─ Slice, Neg, Concat, Mul(cos), Mul(sin), Add ─ y                              before
    x ─ RotaryEmbedding(Gather(cos table, positions), Gather(sin table, positions)) ─ y           after, beside onnx24
    x ─ com.microsoft::RotaryEmbedding(positions, cos table, sin table) ─ y                            after, beside gqa

What is a rotary embedding is found in `rotations.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from partita.export.attention.base import Fused
from partita.export.passes.base import Pass, PassContext, over
from partita.export.passes.regions import last_size
from partita.export.passes.rewriting import discard, drop_unused_initializers, remove_unread, stand_in, take_names
from partita.export.passes.rotary_attention import ATTENTION
from partita.export.passes.rotations import Rotation, rotation_of, table_in
from partita.export.passes.views import VIEWS

READERS: Mapping[Fused, Mapping[str, tuple[int, ...]]] = {
    "contrib": {ATTENTION: (0, 1)},
    "standard": {"Attention": (0, 1), "TensorScatter": (1,)},
    "none": {},
}
"""Inputs that turned queries and keys go into."""
POSITIONS_AXIS = 2
"""Of what the operators turn."""


def run(model: ir.Model, context: PassContext) -> int:
    """Rewrite every rotary embedding before attention that the target has an operator for; returns how many."""
    graph, positions = model.graph, context.input(model.graph, "positions")
    readers = READERS[context.fused]
    if positions is None or not readers:
        return 0
    count = 0
    for node in [n for n in graph if n.op_type in readers]:
        for index in readers[node.op_type]:
            with over(node):
                count += _rewritten(graph, node.inputs[index], positions, context)
    drop_unused_initializers(graph)
    return count


def _rewritten(graph: ir.Graph, value: ir.Value | None, positions: ir.Value, context: PassContext) -> bool:
    """Rewrite the embedding that `value` is a view of; False where it is none."""
    while value is not None and (maker := value.producer()) is not None and maker.op_type in VIEWS:
        value = maker.inputs[0]
    found = None if value is None else rotation_of(value, positions, context.spec.max_length)
    if found is None or found.axis != POSITIONS_AXIS:
        return False
    tables = [table_in(graph, label, array, found) for label, array in (("cos", found.cos), ("sin", found.sin))]
    if context.fused == "standard":
        rows = [_rows(graph, table, positions) for table in tables]
        new = ir.Node("", "RotaryEmbedding", [found.source, *rows], _attributes(found))
    else:
        new = ir.Node(
            "com.microsoft", "RotaryEmbedding", [found.source, _wide(graph, positions), *tables], _attributes(found)
        )
    if not context.takes(new):
        made = [each.producer() for each in new.inputs[1:] if each is not None]
        discard(new)
        remove_unread(graph, made)
        return False
    stand_in(graph, found.result, new)
    return True


def _attributes(found: Rotation) -> list[ir.Attr]:
    """How much of how many heads is turned, and whether pairs are neighbours."""
    assert found.source.shape is not None
    heads, turned = found.source.shape[1], 2 * found.cos.shape[1]
    assert isinstance(heads, int)
    attributes = [ir.AttrInt64("interleaved", int(found.interleaved))]
    if turned != last_size(found.source):
        attributes += [ir.AttrInt64("rotary_embedding_dim", turned), ir.AttrInt64("num_heads", heads)]
    return attributes


def _rows(graph: ir.Graph, table: ir.Value, positions: ir.Value) -> ir.Value:
    """The rows [B, S, R/2] of a table at the positions, looked up once for all layers."""
    return _once(graph, positions, "Gather", [table, positions], {"axis": 0}, table.dtype, table.shape)


def _wide(graph: ir.Graph, positions: ir.Value) -> ir.Value:
    """The positions in int64, which the operator wants, once for all layers."""
    if positions.dtype == ir.DataType.INT64:
        return positions
    return _once(graph, positions, "Cast", [positions], {"to": int(ir.DataType.INT64)}, ir.DataType.INT64, None)


def _once(
    graph: ir.Graph,
    positions: ir.Value,
    operator: str,
    inputs: list[ir.Value],
    attributes: dict[str, int],
    dtype: ir.DataType | None,
    table: ir.Shape | None,
) -> ir.Value:
    """The output of a node that reads the positions; one that is there already is the same."""
    readers = [use.node for use in positions.uses()]
    for node in readers:
        if node.op_type == operator and list(node.inputs) == inputs and node.graph is graph:
            return node.outputs[0]
    new = ir.node(operator, inputs, attributes)
    assert positions.shape is not None and dtype is not None
    new.outputs[0].shape = ir.Shape([*positions.shape, *([table[-1]] if table is not None else [])])
    new.outputs[0].dtype = dtype
    if readers:
        take_names(new, readers[0])
    graph.insert_before(graph[0], new)
    return new.outputs[0]


PASS = Pass("rotary_embedding", run)
