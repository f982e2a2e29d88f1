"""ONNX Runtime's operators on packed integers.

    y = MatMulNBits(x [..., K], W [N, M, bytes], scales [N, M], zero points [N, packed M], bias [N])
    e = GatherBlockQuantized(E [V, bytes], ids, scales [V, M], zero points [V, packed M])

Both read the same bytes, so that a tied embedding and head are stored once. QMoE reads stacks of experts
(`experts.py`).
"""

from __future__ import annotations

import math

import onnx_ir as ir

from partita.export.quantise.forms.base import Form, LookUp, PackedExperts, Place, Product, Weight, last
from partita.export.quantise.write import experts
from partita.export.quantise.write.layouts import InRows

DOMAIN = "com.microsoft"
MATMUL, GATHER = "MatMulNBits", "GatherBlockQuantized"
EXACT_LEVEL = 0
"""The accuracy level without quantised activations."""


def _product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
    inputs: list[ir.Value | None] = [hidden, *weight.values]
    if bias is not None and place.kernels.bias:
        inputs += [None] * (5 - len(inputs)) + [bias]
    attributes = {
        "K": weight.width,
        "N": weight.rows,
        "bits": weight.packing.grid.bits,
        "block_size": weight.packing.block_size,
        "accuracy_level": place.kernels.accuracy_level,
    }
    shape = last(hidden, weight.rows)
    made = place.node(MATMUL, inputs, dtype=hidden.dtype, shape=shape, domain=DOMAIN, attributes=attributes)
    if bias is not None and not place.kernels.bias:
        made = place.node("Add", [made, bias], dtype=hidden.dtype, shape=shape)
    return made


def _look_up(place: Place, ids: ir.Value, weight: Weight) -> ir.Value:
    data, scales, *zeros = weight.values
    assert data.shape is not None and ids.shape is not None
    flat = place.reshaped(data, (weight.rows, math.prod(data.shape.numpy()[1:])), f"{data.name}.rows")
    attributes = {
        "bits": weight.packing.grid.bits,
        "block_size": weight.packing.block_size,
        "gather_axis": 0,
        "quantize_axis": 1,
    }
    return place.node(
        GATHER,
        [flat, ids, scales, *zeros],
        dtype=scales.dtype,
        shape=[*ids.shape, weight.width],
        domain=DOMAIN,
        attributes=attributes,
    )


def _exact(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == MATMUL and node.domain == DOMAIN:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", EXACT_LEVEL)
    experts.make_exact(model)


FORM = Form(
    "matmul_nbits",
    "MatMulNBits and GatherBlockQuantized",
    Product(f"{MATMUL} ({DOMAIN})", InRows(), _product, _exact),
    LookUp(InRows(), _look_up),
    PackedExperts(experts.OPERATOR, InRows(), experts.write),
    domains=(DOMAIN,),
    fills_up=True,
)
