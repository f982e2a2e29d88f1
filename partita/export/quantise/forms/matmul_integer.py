"""8-bit integer products in standard operators, for machines with an integer matrix unit.

    y = Cast(MatMulInteger(q, W [K, N], zero point 128)) * s * scales [N]

q and s are the activations, quantised with one scale per token (`rounding.py`). DynamicQuantizeMatMul has one scale for
all tokens, and the activations of a text's first token are hundreds of times larger than the others. Weights are signed
with one scale per output channel, as ONNX Runtime's matrix unit requires (core/mlas, MlasGemm with a signed right
side).
"""

from __future__ import annotations

import onnx_ir as ir

from partita.export.quantise.forms.base import Form, Place, Product, Weight, last
from partita.export.quantise.rounding.activations import before_rounding, rounded, zero_point
from partita.export.quantise.write.layouts import InColumns
from partita.export.quantise.write.look_up import LOOK_UP

MATMUL = "MatMulInteger"


def _product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
    data, scales = weight.values
    assert hidden.dtype is not None
    integers, scale = rounded(place, hidden, weight.width)
    shape, kind = last(hidden, weight.rows), hidden.dtype
    whole = place.node(MATMUL, [integers, data, zero_point(place)], dtype=ir.DataType.INT32, shape=shape)
    made = place.node("Cast", [whole], dtype=kind, shape=shape, attributes={"to": int(kind)})
    made = place.node("Mul", [made, scale], dtype=kind, shape=shape)
    made = place.node("Mul", [made, scales], dtype=kind, shape=shape)
    return made if bias is None else place.node("Add", [made, bias], dtype=kind, shape=shape)


def _exact(model: ir.Model) -> None:
    """Multiply x / s without rounding by the weights as floats."""
    for node in [node for node in model.graph if node.op_type == MATMUL]:
        integers, data, _ = node.inputs
        (cast,) = [use.node for use in node.outputs[0].uses()]
        (scaled,) = [use.node for use in cast.outputs[0].uses()]
        assert data is not None
        steps = ir.node("Div", inputs=[before_rounding(integers), scaled.inputs[1]], name=f"{node.name}.steps")
        wide = ir.node("Cast", inputs=[data], attributes={"to": int(ir.DataType.FLOAT)}, name=f"{node.name}.weight")
        product = ir.node("MatMul", inputs=[*steps.outputs, *wide.outputs], name=f"{node.name}.exact")
        for new in (steps, wide, product):
            new.outputs[0].name = f"{new.name}.output"
            model.graph.insert_before(node, new)
        product.outputs[0].type, product.outputs[0].shape = cast.outputs[0].type, cast.outputs[0].shape
        cast.outputs[0].replace_all_uses_with(product.outputs[0])
        model.graph.remove([cast, node], safe=True)


FORM = Form(
    "matmul_integer",
    "MatMulInteger over activations quantised per token, in standard operators",
    Product(f"{MATMUL} over quantised activations", InColumns(one_scale=True), _product, _exact),
    LOOK_UP,
    opset=18,
    bits=(8,),
    one_scale=True,
)
