"""8-bit integer products in ONNX Runtime's operator, which scales the result.

    y = MatMulIntegerToFloat(q, W [K, N], 1, scales [N], zero point 128) * s

q and s are the activations, quantised with one scale per token (`rounding.py`). The operator has one scale for all
activations, which is 1 here; s is applied after it. It saves two passes over the result.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from partita.export.quantise.forms.base import Form, Place, Product, Weight, last
from partita.export.quantise.rounding.activations import before_rounding, rounded, zero_point
from partita.export.quantise.write.layouts import InColumns
from partita.export.quantise.write.look_up import LOOK_UP

DOMAIN = "com.microsoft"
MATMUL = "MatMulIntegerToFloat"


def _product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
    data, scales = weight.values
    assert hidden.dtype is not None
    integers, scale = rounded(place, hidden, weight.width)
    shape, kind = last(hidden, weight.rows), hidden.dtype
    one = place.constant(np.array(1, kind.numpy()), "rounding.one")
    inputs = [integers, data, one, scales, zero_point(place)]
    made = place.node(MATMUL, inputs, dtype=kind, shape=shape, domain=DOMAIN)
    made = place.node("Mul", [made, scale], dtype=kind, shape=shape)
    return made if bias is None else place.node("Add", [made, bias], dtype=kind, shape=shape)


def _exact(model: ir.Model) -> None:
    """Multiply x / s without rounding by the weights as floats."""
    for node in [node for node in model.graph if node.op_type == MATMUL]:
        integers, data, _, scales, _ = node.inputs
        (scaled,) = [use.node for use in node.outputs[0].uses()]
        assert data is not None
        steps = ir.node("Div", inputs=[before_rounding(integers), scaled.inputs[1]], name=f"{node.name}.steps")
        wide = ir.node("Cast", inputs=[data], attributes={"to": int(ir.DataType.FLOAT)}, name=f"{node.name}.wide")
        weight = ir.node("Mul", inputs=[*wide.outputs, scales], name=f"{node.name}.weight")
        product = ir.node("MatMul", inputs=[*steps.outputs, *weight.outputs], name=f"{node.name}.exact")
        for new in (steps, wide, weight, product):
            new.outputs[0].name = f"{new.name}.output"
            model.graph.insert_before(node, new)
        product.outputs[0].type, product.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        node.outputs[0].replace_all_uses_with(product.outputs[0])
        model.graph.remove(node, safe=True)


FORM = Form(
    "matmul_integer_to_float",
    "MatMulIntegerToFloat over activations quantised per token",
    Product(f"{MATMUL} ({DOMAIN}) over quantised activations", InColumns(one_scale=True), _product, _exact),
    LOOK_UP,
    opset=18,
    domains=(DOMAIN,),
    bits=(8,),
    one_scale=True,
)
