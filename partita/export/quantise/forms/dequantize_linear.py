"""Standard operators: DequantizeLinear of a constant before MatMul, which compilers fuse.

    y = MatMul(x [..., K], DequantizeLinear(W [K, N], scales [M, N], zero points [M, N], axis=0, block_size=B))
    e = Reshape(Mul(Cast(Gather(E [V, M, B], ids)), Gather(scales [V, M, 1], ids)))

OpenVINO keeps the weights compressed. ONNX Runtime fuses the two nodes into MatMulNBits for the CPU provider, at
accuracy level 4 (optimizer/qdq_transformer/selectors_actions, DQMatMulToMatMulNBits). Embedding rows are looked up as
integers, because DequantizeLinear before Gather would dequantise the whole embedding in every step.
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
    """Count the axis from the end, which prevents the fusion by ONNX Runtime: the product runs in float32.

    If a later version fuses it, the activations are quantised and the tight tolerance fails.
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
