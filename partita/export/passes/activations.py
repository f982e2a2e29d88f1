"""One operator for a SiLU, with any slope.

    x ─┬─ (Mul(alpha)) ─ Sigmoid ─┬─ Mul ─ y                            before
       └──────────────────────────┘
    x ─ QuickGelu(alpha) ─ y                                            after, with gqa
    x ─ Swish(alpha) ─ y                                                after, with onnx24, where there is a kernel

From opset 20 on, GELU is one operator in the traced graph: a module that computes it, by the error function or tanh,
is replaced by torch's own function while tracing.
"""

from __future__ import annotations

import onnx_ir as ir

from partita.export.passes.base import TracedGraph, constant, node_pass, only_consumer, stand_in


def _rewritten(graph: ir.Graph, sigmoid: ir.Node, traced: TracedGraph) -> bool:
    """Rewrite the product of a value and its Sigmoid; False where there is none."""
    curve, inner = sigmoid.outputs[0], sigmoid.inputs[0]
    product = only_consumer(curve)
    if inner is None or product is None or product.op_type != "Mul" or product.outputs[0].is_graph_output():
        return False
    source = next((value for value in product.inputs if value is not curve), None)
    alpha = 1.0 if source is inner else _slope(inner, source)
    if source is None or alpha is None:
        return False
    domain, operator = ("com.microsoft", "QuickGelu") if traced.fused == "contrib" else ("", "Swish")
    new = ir.Node(domain, operator, [source], [ir.AttrFloat32("alpha", alpha)])
    if not traced.accepts(new):
        return False
    stand_in(graph, product.outputs[0], new)
    return True


def _slope(inner: ir.Value, source: ir.Value | None) -> float | None:
    """The number that `source` is multiplied by to get `inner`; None for other values."""
    scaled = inner.producer()
    if scaled is None or scaled.op_type != "Mul" or source not in scaled.inputs:
        return None
    factor = constant(next((value for value in scaled.inputs if value is not source), None))
    return float(factor[0]) if factor is not None and len(factor) == 1 else None


PASS = node_pass("activations", ("Sigmoid",), _rewritten, "contrib", "standard")
