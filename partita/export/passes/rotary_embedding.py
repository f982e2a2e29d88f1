"""Rotary embeddings inside the attention operator, or as one operator.

    query ─ rotary embedding(cos, sin at the positions) ─┐
    key ─── rotary embedding(cos, sin at the positions) ─┴ GroupQueryAttention                    before
    query, key ─ GroupQueryAttention(do_rotary, tables of cos and sin)                            after, with gqa

    x [B, H, S, D], cos, sin ─ partita::Rotation ─ y                                              before
    x ─ RotaryEmbedding(Gather(cos table, positions), Gather(sin table, positions)) ─ y           after, with onnx24
    x ─ com.microsoft::RotaryEmbedding(positions, cos table, sin table) ─ y                       after, with gqa

GroupQueryAttention infers the positions; both of its inputs must be rotated in the same way. A rotary embedding is a
placeholder of the trace, of a whole head or its first numbers, in halves or neighbouring pairs, whose cosines and sines
are in tables.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from partita.export.passes.arithmetic import Array, UnknownError, compute_values, last_size, same_type
from partita.export.passes.base import (
    ATTENTION,
    Pass,
    TracedGraph,
    added,
    only_consumer,
    remove_unread,
    replace,
    rewrite_nodes,
    stand_in,
    take_names,
)
from partita.export.passes.views import VIEWS
from partita.export.trace import DOMAIN, ROTATION
from partita.export.weights.sources import weight_part

COS, FIRST_AFTER = 7, 9
"""Input indices of the operator (ONNX Runtime ContribOperators.md)."""
HEADS_IN, HALVES_IN = 16, 8
"""Required divisors of the head size and of a table row, checked by ONNX Runtime 1.31.1 at run time."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary embedding of `source` [B, H, S, D] into `result`."""

    source: ir.Value
    result: ir.Value
    interleaved: bool
    """Pairs are neighbours in the result."""
    cos: Array
    sin: Array
    """[N, R/2], in the dtype of the graph's tables."""


def run(traced: TracedGraph) -> int:
    """Replace every placeholder that the target has an operator for; returns their number."""
    graph, positions = traced.graph, traced.input("positions")
    if positions is None or traced.fused == "none":
        return 0

    def replaced(node: ir.Node) -> bool:
        reader = only_consumer(node.outputs[0])
        found = reader and _of_part(reader.outputs[0], positions)
        found = found or rotation_of(node.outputs[0], positions)
        return found is not None and _as_operator(graph, found, positions, traced)

    count = 0
    if traced.fused == "contrib":
        count = rewrite_nodes(graph, (ATTENTION,), lambda node: _fused_in_attention(graph, node, positions, traced))
    return count + rewrite_nodes(graph, (ROTATION,), replaced)


def rotation_of(result: ir.Value, positions: ir.Value) -> Rotation | None:
    """The placeholder that computes `result`, if its cosines and sines are tables; None for other nodes."""
    node = result.producer()
    if node is not None and node.op_type == "Concat":
        return _of_part(result, positions)
    if node is None or (node.domain, node.op_type) != (DOMAIN, ROTATION):
        return None
    source, *waves = node.inputs
    assert source is not None
    columns = [_columns(wave, positions, node) for wave in waves]
    cos, sin = columns[:2]
    if cos is None or sin is None:
        return None
    if any(each is None or not np.array_equal(each, (cos, sin)[index % 2]) for index, each in enumerate(columns)):
        return None
    return Rotation(source, result, bool(node.attributes.get_int("interleaved", 0)), cos, sin)


def _of_part(result: ir.Value, positions: ir.Value) -> Rotation | None:
    """The rotary embedding of a head whose first numbers alone are rotated; None for other results."""
    node = result.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    part, rest = node.inputs
    found = part and rest and part.producer() and rotation_of(part, positions)
    makers = [each.producer() for each in (found.source, rest)] if found and rest else []
    sources = {maker.inputs[0] for maker in makers if maker is not None and maker.inputs}
    source = sources.pop() if len(sources) == 1 else None
    if not found or rest is None or source is None or not same_type(source, result):
        return None
    width = last_size(source) or 0
    numbers = np.arange(width).reshape(1, 1, 1, width)
    try:
        values = compute_values(list(dict.fromkeys(maker for maker in makers if maker)), {source: numbers})
    except UnknownError:
        return None
    if not np.array_equal(np.concatenate([values[found.source], values[rest]], -1), numbers):
        return None
    return dataclasses.replace(found, source=source, result=result)


def _columns(value: ir.Value | None, positions: ir.Value, node: ir.Node) -> Array | None:
    """The columns [N, R/2] of a table looked up by position; None without one, and for pairs of different angles."""
    lookup = None if value is None else value.producer()
    if lookup is None or lookup.op_type != "Gather" or lookup.inputs[1] is not positions:
        return None
    table = lookup.inputs[0]
    if table is None or table.const_value is None or weight_part(table) is not None:
        return None
    first, second = (table.const_value.numpy()[:, node.attributes.get_ints(name)] for name in ("first", "second"))
    return first if np.array_equal(first, second) else None


def _fused_in_attention(graph: ir.Graph, node: ir.Node, positions: ir.Value, traced: TracedGraph) -> bool:
    """Move the rotation of query and key into their attention; False where that is impossible or not supported."""
    if node.attributes.get_int("do_rotary", 0):
        return False
    found = [rotation_of(end, positions) for index in (0, 1) if (end := _viewed_value(node, index)) is not None]
    pair = [each for each in found if each is not None]
    if len(pair) != 2 or len({each.interleaved for each in pair}) != 1 or not _fits(pair[0]):
        return False
    if not np.array_equal(pair[0].cos, pair[1].cos) or not np.array_equal(pair[0].sin, pair[1].sin):
        return False
    tables = _tables(graph, pair[0])
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
    """Whether the operator supports the rotated size. ONNX Runtime checks it only at run time."""
    width, half = last_size(rotation.source), rotation.cos.shape[1]
    return width is not None and width % HEADS_IN == 0 and half % HALVES_IN == 0


def _as_operator(graph: ir.Graph, found: Rotation, positions: ir.Value, traced: TracedGraph) -> bool:
    """Replace an embedding by the operator; False where the target does not support it."""
    tables = _tables(graph, found)
    if traced.fused == "standard":  # tables [B, S, R/2] at the positions
        domain = ""
        others = [_once(graph, "Gather", [table, positions], table.dtype, axis=0) for table in tables]
    else:
        domain, wide = "com.microsoft", positions
        if positions.dtype != ir.DataType.INT64:  # as the operator requires
            wide = _once(graph, "Cast", [positions], ir.DataType.INT64, to=int(ir.DataType.INT64))
        others = [wide, *tables]
    new = ir.Node(domain, "RotaryEmbedding", [found.source, *others], _attributes(found))
    made = [each.producer() for each in others]
    if not traced.accepts(new):
        remove_unread(graph, made)
        return False
    stand_in(graph, found.result, new)
    return True


def _attributes(found: Rotation) -> list[ir.Attr]:
    """Attributes: rotated size, number of heads, interleaving."""
    assert found.source.shape is not None
    heads, turned = found.source.shape[1], 2 * found.cos.shape[1]
    assert isinstance(heads, int)
    attributes = [ir.AttrInt64("interleaved", int(found.interleaved))]
    if turned != last_size(found.source):
        attributes += [ir.AttrInt64("rotary_embedding_dim", turned), ir.AttrInt64("num_heads", heads)]
    return attributes


def _once(graph: ir.Graph, operator: str, inputs: list[ir.Value], dtype: ir.DataType | None, **given: int) -> ir.Value:
    """The output of a node shared by all layers. `inputs`: a table, if any, and the positions."""
    positions = inputs[-1]
    readers = [use.node for use in positions.uses()]
    for node in readers:
        same = node.op_type == operator and list(node.inputs) == inputs and node.outputs[0].dtype == dtype
        if same and node.graph is graph:
            return node.outputs[0]
    new = ir.node(operator, inputs, given)
    assert positions.shape is not None and dtype is not None
    row = [size for table in inputs[:-1] for size in (table.shape or ())[1:]]
    new.outputs[0].shape, new.outputs[0].dtype = ir.Shape([*positions.shape, *row]), dtype
    if readers:
        take_names(new, readers[0])
    graph.insert_before(graph[0], new)
    return new.outputs[0]


def _tables(graph: ir.Graph, rotation: Rotation) -> list[ir.Value]:
    """Both tables as graph constants in the dtype of the rotated value; equal tables share one constant."""
    dtype = rotation.source.dtype
    assert dtype is not None
    found = []
    for label, array in (("cos", rotation.cos), ("sin", rotation.sin)):
        tensor, number = ir.tensor(array.astype(dtype.numpy()), dtype=dtype), 0
        while (other := graph.initializers.get(f"rotary.{label}.{number}")) is not None:
            assert other.const_value is not None
            if np.array_equal(other.const_value.numpy(), tensor.numpy()):
                break
            number += 1
        found.append(added(graph, tensor, f"rotary.{label}.{number}"))
    return found


PASS = Pass("rotary_embedding", run)
