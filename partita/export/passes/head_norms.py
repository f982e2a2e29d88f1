"""Norms of the heads of queries and keys without their Reshapes.

    x [B, S, H*D] ─ Reshape [B, S, H, D] ─ SimplifiedLayerNormalization(w [D]) ─ Reshape [B, S, H*D] ─ y     before
    x ─ BranchwiseRMSNorm(w, H branches) ─ y                                                      after, with gqa

The attention operator has inputs for both norms, but ONNX Runtime 1.31.1 implements them for CUDA and WebGPU only. They
are not written, because the CPU provider could not verify the graph.
"""

from __future__ import annotations

import onnx_ir as ir

from partita.export.passes.arithmetic import last_size
from partita.export.passes.base import (
    ATTENTION,
    TracedGraph,
    node_pass,
    only_consumer,
    remove_unread,
    stand_in,
    take_names,
)

HeadNorm = tuple[ir.Value, ir.Value, ir.Node]
"""The source and the result of a norm of heads, both [B, S, H*D], and the norm."""


def _rewritten(graph: ir.Graph, attention: ir.Node, traced: TracedGraph) -> int:
    """Rewrite the head norms of queries and keys; returns their number."""
    norms = [_norm_of(value) for value in attention.inputs[:2]]
    return sum(_by_branches(graph, *norm, traced) for norm in norms if norm is not None)


def _norm_of(value: ir.Value | None) -> HeadNorm | None:
    """The head norm that computes an input of attention [B, S, H*D]; None without one."""
    last = None if value is None else value.producer()
    if value is None or last is None or last.op_type != "Reshape" or only_consumer(value) is None:
        return None
    norm = last.inputs[0].producer() if last.inputs[0] is not None else None
    if norm is None or norm.op_type != "SimplifiedLayerNormalization" or only_consumer(norm.outputs[0]) is None:
        return None
    split = norm.inputs[0].producer() if norm.inputs[0] is not None else None
    source = split.inputs[0] if split is not None and split.op_type == "Reshape" else None
    if source is None or source.shape is None or value.shape is None:
        return None
    if [str(size) for size in source.shape] != [str(size) for size in value.shape] or source.shape.rank() != 3:
        return None
    return source, value, norm


def _by_branches(graph: ir.Graph, source: ir.Value, result: ir.Value, norm: ir.Node, traced: TracedGraph) -> bool:
    """Normalise the heads in one node; False where the target does not support it."""
    width, whole, scale = last_size(norm.outputs[0]), last_size(source), norm.inputs[1]
    if width is None or whole is None or scale is None:
        return False
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    attributes = [ir.AttrInt64("num_branches", whole // width), ir.AttrFloat32("epsilon", epsilon)]
    new = ir.Node("com.microsoft", "BranchwiseRMSNorm", [source, scale], attributes)
    if not traced.accepts(new):
        return False
    stand_in(graph, result, new)
    take_names(new, norm)
    remove_unread(graph, [norm])
    return True


PASS = node_pass("head_norms", (ATTENTION,), _rewritten, "contrib")
