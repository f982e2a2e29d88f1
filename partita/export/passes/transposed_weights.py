"""Store a weight in the layout of its operator.

    MatMul(x, Transpose(W))                               before: transposed in memory at every session start
    MatMul(x, Wt)                                         after: stored transposed

    MoE(x, Reshape(Transpose(Reshape(W [E, 2*I, H]))))    before: transposed in memory at every session start
    MoE(x, W with interleaved halves)                     after: stored in this layout

    Gemm(x, Reshape(W [E, F, H] -> [E*F, H]))             before: a second copy in memory
    Gemm(x, W viewed as [E*F, H])                         after: the same bytes with another shape

    h [B, K, H] ─ MatMul(Transpose(E)) ─ logits [B, K, V]                               before: a second copy in memory
    h [B, K, H] ─ Reshape [B*K, H] ─ Gemm(E, transB=1) ─ Reshape [B, K, V] ─ logits     after, where E is the embedding

A weight with another reader (a tied embedding) stays as it is. The Transpose would hide it from quantisers.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from partita.export.passes.base import (
    TracedGraph,
    added,
    constant,
    integers,
    node_pass,
    only_consumer,
    replace,
    take_names,
)
from partita.export.weights.sources import StoredPart, weight_part


def _fold(graph: ir.Graph, node: ir.Node, traced: TracedGraph) -> bool:
    """Fold one node, or the interleaving that starts with it, into its weight; False where that is impossible."""
    value = node.inputs[0]
    weight = weight_part(value)
    if value is None or weight is None or weight.is_reshaped:
        return False
    if len(value.uses()) > 1:
        return node.op_type == "Transpose" and _as_tied_head(graph, node, value)
    if node.op_type == "Transpose":
        order = tuple(node.attributes.get_ints("perm", range(weight.shape.rank())[::-1]))
        name = f"{value.name}.{'transposed' if len(order) == 2 else 'permuted'}"
        return _replace_nodes(graph, (node,), weight.permuted(order), name)
    shape = _reshaped_to(node, weight)
    if shape is None:
        return False
    if (rest := _interleaving(node, weight.part.shape, shape)) is not None:
        axis, nodes = rest
        return _replace_nodes(graph, (node, *nodes), weight.interleaved(axis), f"{value.name}.interleaved")
    following = only_consumer(node.outputs[0])
    if weight.shape.rank() < 3 or following is None or following.op_type in ("Transpose", "Reshape"):
        return False
    return _replace_nodes(graph, (node,), weight.reshaped(shape), f"{value.name}.reshaped")


def _reshaped_to(node: ir.Node, weight: StoredPart) -> tuple[int, ...] | None:
    """The shape after a Reshape of `weight`; None where it is not constant."""
    sizes = constant(node.inputs[1])
    if sizes is None or 0 in sizes:
        return None
    rest = math.prod(size for size in sizes if size != -1)
    return tuple(weight.size // rest if size == -1 else int(size) for size in sizes)


def _interleaving(
    first: ir.Node, before: tuple[int, ...], split: tuple[int, ...]
) -> tuple[int, tuple[ir.Node, ir.Node]] | None:
    """The axis of interleaved halves, and the nodes after `first` that belong to it; None where there are none."""
    axes = [axis for axis in range(len(before)) if split == (*before[:axis], 2, before[axis] // 2, *before[axis + 1 :])]
    turn = only_consumer(first.outputs[0])
    last = only_consumer(turn.outputs[0]) if turn is not None and turn.op_type == "Transpose" else None
    if turn is None or last is None or last.op_type != "Reshape":
        return None
    for axis in axes:
        order = list(range(len(split)))
        order[axis], order[axis + 1] = axis + 1, axis
        joined = last.outputs[0].shape
        if list(turn.attributes.get_ints("perm", [])) == order and joined == ir.Shape(before):
            return axis, (turn, last)
    return None


def _replace_nodes(graph: ir.Graph, nodes: tuple[ir.Node, ...], weight: StoredPart | None, name: str) -> bool:
    """Replace the result of the last of `nodes` with `weight`, and remove the nodes; False where `weight` is None."""
    if weight is None:
        return False
    nodes[-1].outputs[0].replace_all_uses_with(added(graph, weight, name))
    for node in reversed(nodes):
        graph.remove(node, safe=True)
    return True


def _as_tied_head(graph: ir.Graph, turn: ir.Node, weight: ir.Value) -> bool:
    """Write the MatMul that alone reads a transposed weight as a Gemm; False where there is none."""
    matmul = only_consumer(turn.outputs[0])
    if matmul is None or matmul.op_type != "MatMul" or matmul.inputs[1] is not turn.outputs[0]:
        return False
    hidden = matmul.inputs[0]
    assert weight.shape is not None
    if weight.shape.rank() != 2 or hidden is None or hidden.shape is None or hidden.shape.rank() != 3:
        return False
    vocabulary, width = weight.shape.numpy()
    batch = hidden.shape[0]
    assert isinstance(batch, int)
    flat = ir.node("Reshape", [hidden, integers(graph, [-1, width], f"{weight.name}.rows")])
    gemm = ir.node("Gemm", [flat.outputs[0], weight], {"transB": 1})
    shape = integers(graph, [batch, -1, vocabulary], f"{weight.name}.logits")
    back = ir.node("Reshape", [gemm.outputs[0], shape])
    for node in (flat, gemm, back):
        take_names(node, matmul)
    for node, size in ((flat, width), (gemm, vocabulary)):
        node.outputs[0].type, node.outputs[0].shape = hidden.type, ir.Shape([None, size])
        graph.insert_before(matmul, node)
    replace(graph, matmul, back)
    return True


PASS = node_pass("transposed_weights", ("Transpose", "Reshape"), _fold)
