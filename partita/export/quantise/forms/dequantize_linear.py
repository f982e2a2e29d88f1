"""Standard operators alone: DequantizeLinear over a constant, which compilers fold into the product behind it.

    y = MatMul(x [..., K], DequantizeLinear(W [K, N], scales [M, N], zero points [M, N], axis=0, block_size=B))
    e = Reshape(Mul(Cast(Gather(E [V, M, B], ids)), Gather(scales [V, M, 1], ids)))

OpenVINO compresses such weights; ONNX Runtime's own optimiser makes MatMulNBits of the two nodes for the CPU provider,
at accuracy level 4 (optimizer/qdq_transformer/selectors_actions, DQMatMulToMatMulNBits). DequantizeLinear before Gather
would restore the whole embedding in every step, so its rows are looked up as integers and scaled then.
"""

from __future__ import annotations

import onnx_ir as ir

from partita.export.quantise.forms.base import Form, Place, Product, Weight, last
from partita.export.quantise.write.layouts import InColumns
from partita.export.quantise.write.look_up import LOOK_UP

RESTORE = "DequantizeLinear"


def _product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
    attributes = {"axis": 0, "block_size": weight.packing.block_size}
    scales = weight.values[1]
    restored = place.node(
        RESTORE, weight.values, dtype=scales.dtype, shape=[weight.width, weight.rows], attributes=attributes
    )
    shape = last(hidden, weight.rows)
    made = place.node("MatMul", [hidden, restored], dtype=hidden.dtype, shape=shape)
    return made if bias is None else place.node("Add", [made, bias], dtype=hidden.dtype, shape=shape)


def _exact(model: ir.Model) -> None:
    """The same axis, counted from the end: ONNX Runtime leaves the two nodes alone then, and multiplies in float32.

    Should a later one fuse them all the same, the twin rounds activations, and the tight tolerance says so.
    """
    for node in model.graph:
        if node.op_type == RESTORE and "block_size" in node.attributes:
            node.attributes["axis"] = ir.AttrInt64("axis", -2)


FORM = Form(
    "dequantize_linear",
    "DequantizeLinear before MatMul, in standard operators",
    Product(f"{RESTORE} of blocks and MatMul", InColumns(), _product, _exact),
    LOOK_UP,
    opset=21,
)
