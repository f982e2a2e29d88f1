"""Rotary embeddings inside the attention operator, or as one operator.

    query ─ rotary embedding(cos, sin at the positions) ─┐
    key ─── rotary embedding(cos, sin at the positions) ─┴ GroupQueryAttention                    before
    query, key ─ GroupQueryAttention(do_rotary, tables of cos and sin)                            after, with gqa

    x [B, H, S, D] ─ Slice, Neg, Concat, Mul(cos), Mul(sin), Add ─ y                              before
    x ─ RotaryEmbedding(Gather(cos table, positions), Gather(sin table, positions)) ─ y           after, with onnx24
    x ─ com.microsoft::RotaryEmbedding(positions, cos table, sin table) ─ y                       after, with gqa

    x ─ Split ─┬─ rest ───────────────────────┬ Concat                        where the last part of a head is rotated
               └─ part ─ RotaryEmbedding ─────┘

GroupQueryAttention infers the positions; both of its inputs must be rotated in the same way. `rotations.py` finds
embeddings of whole or partial heads, in halves or neighbouring pairs: before the attention, or else from the readers of
cosines and sines upwards. Where neighbouring pairs come out as halves, a Gather reorders them before the rotation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from partita.export.passes.arithmetic import Array, last_size
from partita.export.passes.base import (
    ATTENTION,
    Pass,
    TracedGraph,
    discard,
    drop_unused_initializers,
    integers,
    only_consumer,
    remove_unread,
    replace,
    rewrite_nodes,
    stand_in,
    take_names,
)
from partita.export.passes.rotations import PARTS, Rotation, is_looked_up, rotation_of, table_in, without_factor
from partita.export.passes.views import VIEWS

CARRIERS = VIEWS | {"Cast", "Concat", "Expand", "Pad"}
"""Operators that pass the rotated value through unchanged, alone or joined with others."""
POSITIONS_AXIS = 2
"""The position axis of the operators' input."""
COS, SIN, FIRST_AFTER = 7, 8, 9
"""Input indices of the operator (ONNX Runtime ContribOperators.md)."""
HEADS_IN, HALVES_IN = 16, 8
"""Required divisors of the head size and of a table row, checked by ONNX Runtime 1.31.1 at run time."""


def run(traced: TracedGraph) -> int:
    """Rewrite every rotary embedding that the target has an operator for; returns the number of rewritten nodes."""
    graph, positions = traced.graph, traced.input("positions")
    if positions is None or traced.fused == "none":
        return 0
    count = 0
    if traced.fused == "contrib":
        count = rewrite_nodes(graph, (ATTENTION,), lambda node: _fused_in_attention(graph, node, positions, traced))
    touched = _touched(graph, positions)
    for end in _ends(graph, touched):
        maker = end.producer()
        if maker is None or maker.graph is not graph:
            continue
        for found in list(_embeddings_in(end, touched, positions, traced.spec.max_length)):
            count += _as_operator(graph, found, positions, traced)
    drop_unused_initializers(graph)
    return count


def _fused_in_attention(graph: ir.Graph, node: ir.Node, positions: ir.Value, traced: TracedGraph) -> bool:
    """Move the rotation of query and key into their attention; False where that is impossible or not supported."""
    if node.attributes.get_int("do_rotary", 0):
        return False
    length = traced.spec.max_length
    found = [rotation_of(end, positions, length) for index in (0, 1) if (end := _viewed_value(node, index)) is not None]
    pair = [each for each in found if each is not None]
    if len(pair) != 2 or len({each.interleaved for each in pair}) != 1 or not _fits(pair[0]):
        return False
    if not np.array_equal(pair[0].cos, pair[1].cos) or not np.array_equal(pair[0].sin, pair[1].sin):
        return False
    tables = [table_in(graph, label, array, pair[0]) for label, array in _arrays(pair[0])]
    inputs = [*node.inputs, *[None] * (COS - len(node.inputs))]
    new = ir.Node(
        node.domain,
        node.op_type,
        [*inputs[:COS], *tables, *inputs[FIRST_AFTER:]],
        [
            *node.attributes.values(),
            ir.AttrInt64("do_rotary", 1),
            *([ir.AttrInt64("rotary_interleaved", 1)] if pair[0].interleaved else []),
        ],
        num_outputs=len(node.outputs),
    )
    if not traced.accepts(new, node):
        return False
    take_names(new, node)
    replace(graph, node, new)
    for each in pair:
        old = each.result.producer()
        each.result.replace_all_uses_with(each.source)
        remove_unread(graph, [old])
    return True


def _viewed_value(node: ir.Node, index: int) -> ir.Value | None:
    """The value that an input of the node is a view of, if nothing else reads the values in between."""
    value = node.inputs[index]
    while value is not None and only_consumer(value) is not None:
        producer = value.producer()
        if producer is None or producer.op_type not in VIEWS:
            return value
        value = producer.inputs[0]
    return None


def _fits(rotation: Rotation) -> bool:
    """Whether the operator supports the rotated size and order. ONNX Runtime checks it only at run time."""
    if rotation.order is not None:
        return False
    width, half = last_size(rotation.source), rotation.cos.shape[1]
    return width is not None and width % HEADS_IN == 0 and (half % HALVES_IN == 0 or rotation.interleaved)


def _arrays(rotation: Rotation) -> Iterator[tuple[str, Array]]:
    """The tables of cosines and sines [N, R/2]; a narrow R is padded with pairs of angle 0."""
    missing = -rotation.cos.shape[1] % HALVES_IN
    for label, table, still in (("cos", rotation.cos, 1.0), ("sin", rotation.sin, 0.0)):
        rest = np.full((len(table), missing), still, table.dtype)
        yield label, np.concatenate([table, rest], 1)


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


def _as_operator(graph: ir.Graph, found: Rotation, positions: ir.Value, traced: TracedGraph) -> bool:
    """Replace an embedding by the operator; False where the target does not support it."""
    tables = [table_in(graph, label, array, found) for label, array in (("cos", found.cos), ("sin", found.sin))]
    before = _reordered(graph, found)
    source = found.source if before is None else before.outputs[0]
    if traced.fused == "standard":
        rows = [
            _once(graph, positions, "Gather", [table, positions], {"axis": 0}, table.dtype, table.shape)
            for table in tables  # [B, S, R/2] at the positions
        ]
        new = ir.Node("", "RotaryEmbedding", [source, *rows], _attributes(found))
    else:
        new = ir.Node(
            "com.microsoft",
            "RotaryEmbedding",
            [source, _int64_positions(graph, positions), *tables],
            _attributes(found),
        )
    if not all(traced.supports(node) for node in (before, new) if node is not None):
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


def _int64_positions(graph: ir.Graph, positions: ir.Value) -> ir.Value:
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
