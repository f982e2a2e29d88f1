"""Norms of the heads of queries and keys without their Reshapes.

    x [B, S, H*D] ─ Reshape [B, S, H, D] ─ SimplifiedLayerNormalization(w [D]) ─ Reshape [B, S, H*D] ─ y     before
    x ─ BranchwiseRMSNorm(w, H branches) ─ y                                                      after, with gqa

The attention operator has inputs for both norms, but ONNX Runtime 1.31.1 implements them for CUDA and WebGPU only. They
are not written, because the CPU provider could not verify the graph.
"""

from __future__ import annotations

import onnx_ir as ir

from partita.export.passes.arithmetic import last_size, same_type
from partita.export.passes.base import ATTENTION, TracedGraph, node_pass, only_consumer, stand_in, take_names

CHAIN = ("Reshape", "SimplifiedLayerNormalization", "Reshape")
"""The nodes of a head norm, the last first."""


def _rewritten(graph: ir.Graph, attention: ir.Node, traced: TracedGraph) -> int:
    """Rewrite the head norms of queries and keys; returns their number."""
    return sum(_by_branches(graph, value, traced) for value in attention.inputs[:2] if value is not None)


def _by_branches(graph: ir.Graph, result: ir.Value, traced: TracedGraph) -> bool:
    """Compute `result` [B, S, H*D] in one node; False where it is no head norm, or the target does not support it."""
    source, nodes = result, list[ir.Node]()
    for operator in CHAIN:
        node = source.producer()
        if node is None or node.op_type != operator or only_consumer(source) is None or node.inputs[0] is None:
            return False
        nodes.append(node)
        source = node.inputs[0]
    norm, whole = nodes[1], last_size(source)
    width = last_size(norm.outputs[0])
    if not same_type(source, result) or width is None or whole is None or len(source.shape or ()) != 3:
        return False
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    attributes = [ir.AttrInt64("num_branches", whole // width), ir.AttrFloat32("epsilon", epsilon)]
    new = ir.Node("com.microsoft", "BranchwiseRMSNorm", [source, norm.inputs[1]], attributes)
    if not traced.accepts(new):
        return False
    stand_in(graph, result, new)
    take_names(new, norm)
    return True


PASS = node_pass("head_norms", (ATTENTION,), _rewritten, "contrib")
