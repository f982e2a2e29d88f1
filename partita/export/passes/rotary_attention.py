"""Rotary embedding of queries and keys inside the attention operator, by tables of cosines and sines.

    query ─ rotary embedding(cos, sin at the positions) ─┐
    key ─── rotary embedding(cos, sin at the positions) ─┴ GroupQueryAttention          before
    query ┐
    key ──┴ GroupQueryAttention(do_rotary, tables of cos and sin)                       after, with gqa

The operator infers the positions. Both inputs must be rotated in the same way. `rotations.py` finds embeddings of whole
or partial heads, in halves or neighbouring pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from partita.export.passes.arithmetic import Array, last_size
from partita.export.passes.base import (
    Pass,
    PassContext,
    discard,
    only_consumer,
    remove_unread,
    replace,
    rewrite_nodes,
    take_names,
)
from partita.export.passes.rotations import Rotation, rotation_of, table_in
from partita.export.passes.views import VIEWS

ATTENTION = "GroupQueryAttention"
COS, SIN, FIRST_AFTER = 7, 8, 9
"""Input indices of the operator (ONNX Runtime ContribOperators.md)."""
HEADS_IN, HALVES_IN = 16, 8
"""Required divisors of the head size and of a table row, checked by ONNX Runtime 1.31.1 at run time."""


def run(model: ir.Model, context: PassContext) -> int:
    """Rewrite every attention node whose query and key have a rotary embedding; returns their number."""
    graph, positions = model.graph, context.input(model.graph, "positions")
    if context.fused != "contrib" or positions is None:
        return 0
    return rewrite_nodes(model, (ATTENTION,), lambda node: _rewritten(graph, node, positions, context))


def _rewritten(graph: ir.Graph, node: ir.Node, positions: ir.Value, context: PassContext) -> bool:
    """Rewrite one node; False where it is not possible, or the target does not support it."""
    if node.attributes.get_int("do_rotary", 0):
        return False
    length = context.spec.max_length
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
    if not context.keeps(new, node):
        discard(new)
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


PASS = Pass("rotary_attention", run)
