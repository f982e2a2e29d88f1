"""Store a weight in the layout of MatMul.

    MatMul(x, Transpose(W))      before: ONNX Runtime would transpose W in memory at every session start
    MatMul(x, Wt)                after: Wt is stored transposed

A weight with another reader (a tied embedding) stays as it is; see `tied_head`.
"""

from __future__ import annotations

import onnx_ir as ir

from partita.export.passes.base import Pass, PassContext, drop_unused_initializers, over
from partita.export.weights.sources import weight_part


def run(model: ir.Model, context: PassContext) -> int:
    """Rewrite every Transpose of a two-dimensional weight without other consumers; returns their number."""
    count = 0
    for node in [n for n in model.graph if n.op_type == "Transpose"]:
        with over(node):
            count += _folded(model.graph, node)
    drop_unused_initializers(model.graph)
    return count


def _folded(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace a Transpose by the weight stored transposed; False where it reads no weight."""
    value = node.inputs[0]
    weight = weight_part(value)
    if value is None or weight is None or len(value.uses()) != 1:
        return False
    if weight.shape.rank() != 2 or list(node.attributes.get_ints("perm", [1, 0])) != [1, 0]:
        return False
    turned = weight.permuted((1, 0))
    if turned is None:
        return False
    name = f"{value.name or ''}.transposed"
    new = ir.Value(name=name, shape=turned.shape, type=ir.TensorType(turned.dtype), const_value=turned)
    graph.initializers[name] = new
    node.outputs[0].replace_all_uses_with(new)
    graph.remove(node, safe=True)
    return True


PASS = Pass("transposed_weights", run)
