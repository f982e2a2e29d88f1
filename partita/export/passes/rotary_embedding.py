"""One operator for a rotary embedding outside the attention operator.

    x [B, H, S, D] ─ Slice, Neg, Concat, Mul(cos), Mul(sin), Add ─ y                              before
    x ─ RotaryEmbedding(Gather(cos table, positions), Gather(sin table, positions)) ─ y           after, with onnx24
    x ─ com.microsoft::RotaryEmbedding(positions, cos table, sin table) ─ y                       after, with gqa

    x ─ Split ─┬─ rest ───────────────────────┬ Concat                        where the last part of a head is rotated
               └─ part ─ RotaryEmbedding ─────┘

`rotations.py` finds rotary embeddings, from the readers of cosines and sines upwards. Where neighbouring pairs come
out as halves, a Gather reorders them before the rotation.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from partita.export.passes.arithmetic import last_size
from partita.export.passes.base import (
    Pass,
    PassContext,
    discard,
    drop_unused_initializers,
    integers,
    over,
    remove_unread,
    stand_in,
    take_names,
)
from partita.export.passes.rotations import PARTS, Rotation, is_looked_up, rotation_of, table_in, without_factor
from partita.export.passes.views import VIEWS

CARRIERS = VIEWS | {"Cast", "Concat", "Expand", "Pad"}
"""Operators that pass the rotated value through unchanged, alone or joined with others."""
POSITIONS_AXIS = 2
"""The position axis of the operators' input."""


def run(model: ir.Model, context: PassContext) -> int:
    """Rewrite every rotary embedding that the target has an operator for; returns their number."""
    graph, positions = model.graph, context.input(model.graph, "positions")
    if positions is None or context.fused == "none":
        return 0
    touched = _touched(graph, positions)
    count = 0
    for end in _ends(graph, touched):
        maker = end.producer()
        if maker is None or maker.graph is not graph:
            continue
        with over(maker):
            for found in list(_embeddings_in(end, touched, positions, context.spec.max_length)):
                count += _rewritten(graph, found, positions, context)
    drop_unused_initializers(graph)
    return count


def _touched(graph: ir.Graph, positions: ir.Value) -> set[ir.Value]:
    """Values computed both from a table lookup by position and from other values."""
    waves, touched = set[ir.Value](), set[ir.Value]()
    for node in graph:
        moving = [value for value in node.inputs if value is not None and value.const_value is None]
        if is_looked_up(node, positions):
            waves.update(node.outputs)
        elif node.domain or node.op_type not in PARTS | CARRIERS:
            continue
        elif moving and waves.issuperset(moving):
            waves.update(node.outputs)
        elif any(value in waves or value in touched for value in moving):
            touched.update(node.outputs)
    return touched


def _ends(graph: ir.Graph, touched: set[ir.Value]) -> list[ir.Value]:
    """The values of `touched` with consumers outside it, in execution order."""
    made = (value for node in graph for value in node.outputs if value in touched)
    return [value for value in made if any(not touched.issuperset(use.node.outputs) for use in value.uses())]


def _embeddings_in(value: ir.Value, touched: set[ir.Value], positions: ir.Value, length: int) -> Iterator[Rotation]:
    """The embeddings that `value` contains."""
    views = [value]
    while (maker := views[-1].producer()) is not None and maker.op_type in VIEWS and maker.inputs[0] in touched:
        views.append(maker.inputs[0])
    for view in reversed(views):
        found = rotation_of(view, positions, length)
        if found is not None and found.axis == POSITIONS_AXIS and not found.result.is_graph_output():
            yield found
            return
    if maker is not None and (maker.op_type in CARRIERS or without_factor(views[-1]) is not None):
        for each in dict.fromkeys(maker.inputs):
            if each is not None and each in touched:
                yield from _embeddings_in(each, touched, positions, length)


def _rewritten(graph: ir.Graph, found: Rotation, positions: ir.Value, context: PassContext) -> bool:
    """Replace an embedding by the operator; False where the target does not support it."""
    tables = [table_in(graph, label, array, found) for label, array in (("cos", found.cos), ("sin", found.sin))]
    before = _reordered(graph, found)
    source = found.source if before is None else before.outputs[0]
    if context.fused == "standard":
        rows = [
            _once(graph, positions, "Gather", [table, positions], {"axis": 0}, table.dtype, table.shape)
            for table in tables  # [B, S, R/2] at the positions
        ]
        new = ir.Node("", "RotaryEmbedding", [source, *rows], _attributes(found))
    else:
        new = ir.Node(
            "com.microsoft", "RotaryEmbedding", [source, _wide(graph, positions), *tables], _attributes(found)
        )
    if not all(context.supports(node) for node in (before, new) if node is not None):
        made = [each.producer() for each in new.inputs[1:] if each is not None]
        discard(new)
        if before is not None:
            discard(before)
        remove_unread(graph, made)
        return False
    old = found.result.producer()
    assert old is not None
    if before is not None:
        take_names(before, old)
        graph.insert_before(old, before)
    stand_in(graph, found.result, new)
    return True


def _reordered(graph: ir.Graph, found: Rotation) -> ir.Node | None:
    """A Gather that reorders the numbers of a head for the rotation; None where they are in order."""
    if found.order is None:
        return None
    width, turned = len(found.order), 2 * found.cos.shape[1]
    name = f"rotary.{'neighbours' if found.interleaved else 'halves'}.{turned}.{width}"
    order = integers(graph, found.order.tolist(), name)
    assert found.source.shape is not None
    new = ir.node("Gather", [found.source, order], {"axis": found.source.shape.rank() - 1})
    new.outputs[0].shape, new.outputs[0].type = found.source.shape, found.source.type
    return new


def _attributes(found: Rotation) -> list[ir.Attr]:
    """Attributes: rotated size, number of heads, interleaving."""
    assert found.source.shape is not None
    heads, turned = found.source.shape[1], 2 * found.cos.shape[1]
    assert isinstance(heads, int)
    attributes = [ir.AttrInt64("interleaved", int(found.interleaved))]
    if turned != last_size(found.source):
        attributes += [ir.AttrInt64("rotary_embedding_dim", turned), ir.AttrInt64("num_heads", heads)]
    return attributes


def _wide(graph: ir.Graph, positions: ir.Value) -> ir.Value:
    """The positions in int64, as the operator requires, shared by all layers."""
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
    """The output of a node that reads the positions; an existing equal node is reused."""
    readers = [use.node for use in positions.uses()]
    for node in readers:
        same = all(node.attributes.get_int(name, 0) == value for name, value in attributes.items())
        if same and node.op_type == operator and list(node.inputs) == inputs and node.graph is graph:
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
