"""Products of 8-bit integers on both sides, for machines with an integer matrix unit, in standard operators.

    s = Max(ReduceMax(Abs(x)), tiny) / 127                        [..., 1], one for every token
    q = Cast(Round(x / s) + 128)                                  [..., K] uint8
    y = Cast(MatMulInteger(q, W [K, N], zero point 128)) * s * scales [N]

Products that read the same x share s and q. DynamicQuantizeMatMul has one scale for all tokens, which the first token
of a text ruins: its activations are hundreds of times as large as the others'. Weights have a sign and a scale for each
output channel: ONNX Runtime's matrix unit wants them so (core/mlas, MlasGemm with a signed right side).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from partita.export.quantisation.forms.base import Form, Place, Product, Weight, last
from partita.export.quantisation.layouts import InColumns
from partita.export.quantisation.look_up import LOOK_UP

MATMUL = "MatMulInteger"
LARGEST, MIDDLE = 127, 128
"""Of rounded activations, and the number that stands for 0."""
TINY = 1e-30
"""In place of the scale of a row that is 0 everywhere."""


def _rounded(place: Place, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Integers and scales of activations."""
    known = place.shared.get((MATMUL, hidden))
    if known is not None:
        return known[0], known[1]
    assert hidden.dtype is not None
    kind, shape, one = hidden.dtype, hidden.shape, last(hidden, 1)

    def number(value: float, name: str) -> ir.Value:
        return place.constant(np.array(value, np.float32), f"rounding.{name}")

    size = place.node("Abs", [hidden], dtype=kind, shape=shape)
    axes = place.constant(np.array([-1], np.int64), "rounding.axes")
    largest = place.node("ReduceMax", [size, axes], dtype=kind, shape=one, attributes={"keepdims": 1})
    positive = place.node("Max", [largest, number(TINY, "tiny")], dtype=kind, shape=one)
    scale = place.node("Mul", [positive, number(1 / LARGEST, "step")], dtype=kind, shape=one)
    steps = place.node("Div", [hidden, scale], dtype=kind, shape=shape)
    whole = place.node("Round", [steps], dtype=kind, shape=shape)
    moved = place.node("Add", [whole, number(MIDDLE, "middle")], dtype=kind, shape=shape)
    byte = ir.DataType.UINT8
    integers = place.node("Cast", [moved], dtype=byte, shape=shape, attributes={"to": int(byte)})
    place.shared[MATMUL, hidden] = integers, scale
    return integers, scale


def _product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
    data, scales = weight.values
    assert hidden.dtype is not None
    integers, scale = _rounded(place, hidden)
    shape, kind = last(hidden, weight.rows), hidden.dtype
    zero = place.constant(np.array(MIDDLE, np.uint8), "rounding.zero_point")
    whole = place.node(MATMUL, [integers, data, zero], dtype=ir.DataType.INT32, shape=shape)
    made = place.node("Cast", [whole], dtype=kind, shape=shape, attributes={"to": int(kind)})
    made = place.node("Mul", [made, scale], dtype=kind, shape=shape)
    made = place.node("Mul", [made, scales], dtype=kind, shape=shape)
    return made if bias is None else place.node("Add", [made, bias], dtype=kind, shape=shape)


def _exact(model: ir.Model) -> None:
    """x / s as it is, in place of what it is rounded to, times the weights as numbers."""
    for node in [node for node in model.graph if node.op_type == MATMUL]:
        integers, data, _ = node.inputs
        (cast,) = [use.node for use in node.outputs[0].uses()]
        steps = _before(integers, ("Cast", "Add", "Round"))
        assert data is not None
        wide = ir.node("Cast", inputs=[data], attributes={"to": int(ir.DataType.FLOAT)}, name=f"{node.name}.weight")
        product = ir.node("MatMul", inputs=[steps, wide.outputs[0]], name=f"{node.name}.exact")
        for new in (wide, product):
            new.outputs[0].name = f"{new.name}.output"
            model.graph.insert_before(node, new)
        product.outputs[0].type, product.outputs[0].shape = cast.outputs[0].type, cast.outputs[0].shape
        cast.outputs[0].replace_all_uses_with(product.outputs[0])
        model.graph.remove([cast, node], safe=True)


def _before(value: ir.Value | None, operators: tuple[str, ...]) -> ir.Value:
    """What the first of a chain of nodes reads, which ends in `value`; `operators`: the last first."""
    for operator in operators:
        node = None if value is None else value.producer()
        assert node is not None and node.op_type == operator, operator
        value = node.inputs[0]
    assert value is not None
    return value


FORM = Form(
    "matmul_integer",
    "MatMulInteger over activations rounded for every token, in standard operators",
    Product(f"{MATMUL} over rounded activations", InColumns(one_scale=True), _product, _exact),
    LOOK_UP,
    opset=18,
    bits=(8,),
    one_scale=True,
)
