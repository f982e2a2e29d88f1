"""Use a tied embedding as the language-model head without a second copy.

    h [B, K, H] ─ MatMul(Transpose(E)) ─ logits [B, K, V]                                   before
    h [B, K, H] ─ Reshape [B*K, H] ─ Gemm(E, transB=1) ─ Reshape [B, K, V] ─ logits         after

ONNX Runtime would fold the Transpose at session start into a second copy (vocabulary x hidden size). The Transpose also
hides the head from quantisers.
"""

from __future__ import annotations

import onnx_ir as ir

from partita.export.passes.base import Pass, PassContext, integers, only_consumer, replace, rewrite_nodes, take_names
from partita.export.weights.sources import weight_part


def run(model: ir.Model, context: PassContext) -> int:
    """Rewrite every MatMul with a transposed, shared weight; returns their number."""
    return rewrite_nodes(model, ("Transpose",), lambda turn: _rewritten(model.graph, turn))


def _rewritten(graph: ir.Graph, turn: ir.Node) -> bool:
    """Rewrite the MatMul that alone reads a transposed weight; False where there is none."""
    weight, matmul = turn.inputs[0], only_consumer(turn.outputs[0])
    kept = weight_part(weight)
    if weight is None or kept is None or matmul is None:
        return False
    if matmul.op_type != "MatMul" or matmul.inputs[1] is not turn.outputs[0]:
        return False
    hidden = matmul.inputs[0]
    if kept.shape.rank() != 2 or hidden is None or hidden.shape is None or hidden.shape.rank() != 3:
        return False
    assert weight.shape is not None
    vocabulary, width = weight.shape.numpy()
    batch = hidden.shape[0]
    assert isinstance(batch, int)
    flat = ir.node("Reshape", inputs=[hidden, integers(graph, [-1, width], f"{weight.name}.rows")])
    gemm = ir.node("Gemm", inputs=[flat.outputs[0], weight], attributes={"transB": 1})
    shape = integers(graph, [batch, -1, vocabulary], f"{weight.name}.logits")
    back = ir.node("Reshape", inputs=[gemm.outputs[0], shape])
    for node in (flat, gemm, back):
        take_names(node, matmul)
    for node, size in ((flat, width), (gemm, vocabulary)):
        node.outputs[0].type, node.outputs[0].shape = hidden.type, ir.Shape([None, size])
        graph.insert_before(matmul, node)
    replace(graph, matmul, back, dead=(turn,))
    return True


PASS = Pass("tied_head", run)
