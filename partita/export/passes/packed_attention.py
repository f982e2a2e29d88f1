"""Join the query, key and value projections into one MatMul.

    x ─┬─ MatMul(Wq) ─ Add(bq) ─ query ─┐
       ├─ MatMul(Wk) ─ Add(bk) ─ key ───┤ GroupQueryAttention                                before
       └─ MatMul(Wv) ─ Add(bv) ─ value ─┘
    x ─ MatMul(Wq | Wk | Wv) ─ Add(bq | bk | bv) ─ GroupQueryAttention(packed)              after, with gqa
    x ─ MatMul(Wq | Wk | Wv) ─ Add(bq | bk | bv) ─ Split ─ ...                              after, with norms between

The joined weight is read from the checkpoint in parts as it is written. A model with one product that it splits in this
order passes it to the operator directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from partita.export.passes.arithmetic import UnknownError, above, compute_values, last_size, nodes_between
from partita.export.passes.base import (
    ATTENTION,
    TracedGraph,
    added,
    discard,
    integers,
    node_pass,
    only_consumer,
    remove_unread,
    replace,
    take_names,
)
from partita.export.passes.views import VIEWS
from partita.export.weights.sources import StoredPart, weight_part

CUTS = frozenset({"Slice", "Split", "Gather", *VIEWS})
BETWEEN = frozenset({"SimplifiedLayerNormalization", "BranchwiseRMSNorm", *VIEWS})
"""Operators between a projection and attention that allow the joined projection followed by a Split."""
LONGEST = 6


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection: its input, weight [H, n], bias [n] and output."""

    source: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    result: ir.Value


def _rewritten(graph: ir.Graph, node: ir.Node, traced: TracedGraph) -> bool:
    """Join the projections before an attention node; False where there are none."""
    return _pack_inputs(graph, node, traced) or _split_after_norms(graph, node)


def _pack_inputs(graph: ir.Graph, node: ir.Node, traced: TracedGraph) -> bool:
    """Give the node all three in one input; False where they are not projections, or the target does not support it."""
    three = node.inputs[:3]
    whole, products = _uncut(three), None
    if whole is None and (products := _projections(three, through=frozenset())) is None:
        return False
    given = _joined_type(products) if products else whole
    inputs, attributes = [given, None, None, *node.inputs[3:]], list(node.attributes.values())
    new = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
    if given is None or not traced.accepts(new, node):
        return False
    if products is not None:
        made = _join_projections(graph, products, node)
        if made is None:
            discard(new)
            return False
        new.replace_input_with(0, made)
    take_names(new, node)
    replace(graph, node, new)
    return True


def _split_after_norms(graph: ir.Graph, node: ir.Node) -> bool:
    """Join projections that are followed by norms, and split the result; False where there are none."""
    products = _projections(node.inputs[:3], through=BETWEEN)
    if products is None or all(each.result is value for each, value in zip(products, node.inputs[:3], strict=True)):
        return False
    made = _join_projections(graph, products, node)
    if made is None:
        return False
    widths = [last_size(each.result) for each in products]
    sizes = integers(graph, widths, "split." + ".".join(map(str, widths)))
    split = ir.Node("", "Split", [made, sizes], [ir.AttrInt64("axis", -1)], num_outputs=len(products))
    take_names(split, node)
    maker = made.producer()
    assert maker is not None
    graph.insert_after(maker, split)
    for each, part in zip(products, split.outputs, strict=True):
        old = each.result.producer()
        part.shape, part.type = each.result.shape, each.result.type
        each.result.replace_all_uses_with(part)
        remove_unread(graph, [old])
    return True


def _projections(values: Sequence[ir.Value | None], through: frozenset[str]) -> tuple[Projection, ...] | None:
    """The projections that compute the values from one input; None where a value is none, or has other consumers."""
    found = [_projection(value, through) for value in values]
    products = tuple(each for each in found if each is not None)
    if len(products) != len(values) or len({each.source for each in products}) != 1:
        return None
    if len({each.bias is None for each in products}) != 1 or len({each.result for each in products}) != len(products):
        return None
    return products


def _projection(value: ir.Value | None, through: frozenset[str]) -> Projection | None:
    for _ in range(LONGEST):
        node = None if value is None or only_consumer(value) is None else value.producer()
        if value is None or node is None:
            return None
        if node.op_type in through:
            value = node.inputs[0]
            continue
        bias = None
        if node.op_type == "Add":
            own = ir.Shape([last_size(value)])
            bias = next((each for each in node.inputs if each and weight_part(each) and each.shape == own), None)
            rest = next((each for each in node.inputs if each is not bias), None)
            node = None if rest is None or only_consumer(rest) is None else rest.producer()
            if bias is None or node is None:
                return None
        source, weight = (*node.inputs, None, None)[:2]
        part = weight_part(weight)
        if node.op_type != "MatMul" or source is None or weight is None or part is None or len(weight.uses()) != 1:
            return None
        return Projection(source, weight, bias, value) if part.shape.rank() == 2 else None
    return None


def _joined_type(products: Sequence[Projection]) -> ir.Value | None:
    """A value with the type and shape of the joined projection, to probe with."""
    first, widths = products[0].result, [last_size(each.result) for each in products]
    if first.shape is None or None in widths:
        return None
    shape = ir.Shape([*first.shape[:-1], sum(width for width in widths if width is not None)])
    return ir.Value(name="packed", shape=shape, type=first.type)


def _join_projections(graph: ir.Graph, products: Sequence[Projection], at: ir.Node) -> ir.Value | None:
    """The projections as one, computed at the first of them; None where the weights cannot be joined."""
    weight = _concatenate_weights([each.weight for each in products], 1)
    bias = None if products[0].bias is None else _concatenate_weights([each.bias for each in products], 0)
    kind = _joined_type(products)
    if weight is None or kind is None or (bias is None and products[0].bias is not None):
        return None
    nodes = [ir.node("MatMul", [products[0].source, added(graph, weight, weight.name or "")])]
    if bias is not None:
        nodes.append(ir.node("Add", [nodes[0].outputs[0], added(graph, bias, bias.name or "")]))
    source = products[0].source.producer()
    for node in nodes:
        take_names(node, at)
        node.outputs[0].shape, node.outputs[0].type = kind.shape, kind.type
    if source is not None:
        graph.insert_after(source, nodes)
    else:
        graph.insert_before(graph[0], nodes)
    return nodes[-1].outputs[0]


def _concatenate_weights(values: Sequence[ir.Value | None], axis: int) -> StoredPart | None:
    """The weights concatenated along `axis`; None where they cannot be stored so."""
    parts = [part for part in map(weight_part, values) if part is not None]
    name = _common_name([part.source.name for part in parts])
    return parts[0].joined(parts[1:], axis, name) if len(parts) == len(values) else None


def _common_name(names: Sequence[str]) -> str:
    """`a.q.weight` and `a.k.weight` -> `a.q+k.weight`."""
    pieces = [name.split(".") for name in names]
    if len({len(each) for each in pieces}) != 1:
        return "+".join(names)
    return ".".join("+".join(dict.fromkeys(each)) for each in zip(*pieces, strict=True))


def _uncut(three: Sequence[ir.Value | None]) -> ir.Value | None:
    """The value that is split into query, key and value in this order; None without one."""
    widths = [0 if value is None else last_size(value) or 0 for value in three]
    query = three[0]
    if query is None or not all(widths):
        return None
    for whole in above(query, CUTS, LONGEST)[1:]:
        if last_size(whole) == sum(widths) and whole.shape is not None and whole.shape.rank() == 3:
            return whole if _are_cuts(whole, three, widths) else None
    return None


def _are_cuts(whole: ir.Value, three: Sequence[ir.Value | None], widths: Sequence[int]) -> bool:
    """Whether the three are consecutive parts of `whole` [B, S, n] with these widths."""
    assert whole.shape is not None
    sizes = [size if isinstance(size, int) else 3 for size in whole.shape]
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    for value, part in zip(three, np.split(numbers, np.cumsum(widths)[:-1], -1), strict=True):
        nodes = None if value is None else nodes_between({whole}, value)
        if value is None or nodes is None:
            return False
        try:
            seen = compute_values(nodes, {whole: numbers})[value]
        except UnknownError:
            return False
        if not np.array_equal(seen, part):
            return False
    return True


PASS = node_pass("packed_attention", (ATTENTION,), _rewritten, "contrib")
