"""Store a weight the way MatMul wants it.

    MatMul(x, Transpose(W))      before: ONNX Runtime would transpose W at every session start, in memory
    MatMul(x, Wt)                after: Wt is written transposed

A weight that something else reads too (a tied embedding) is left alone: `tied_head` deals with it.
"""

from __future__ import annotations

import onnx_ir as ir

from partita.export.passes.rewriting import drop_unused_initializers
from partita.export.weights import CheckpointWeight


def run(model: ir.Model) -> int:
    """Rewrite every Transpose of a two-dimensional weight that nothing else reads; returns how many."""
    graph = model.graph
    count = 0
    for node in [n for n in graph if n.op_type == "Transpose"]:
        weight = node.inputs[0]
        if weight is None or not isinstance(weight.const_value, CheckpointWeight) or len(weight.uses()) != 1:
            continue
        if weight.const_value.shape.rank() != 2 or list(node.attributes.get_ints("perm", [1, 0])) != [1, 0]:
            continue
        turned = weight.const_value.transpose()
        name = weight.name or ""
        value = ir.Value(
            name=f"{name}.transposed", shape=turned.shape, type=ir.TensorType(turned.dtype), const_value=turned
        )
        graph.initializers[f"{name}.transposed"] = value
        node.outputs[0].replace_all_uses_with(value)
        graph.remove(node, safe=True)
        count += 1
    drop_unused_initializers(graph)
    return count
