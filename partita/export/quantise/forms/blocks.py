"""Products and look-ups of integers with a scale per block.

ONNX Runtime's operators on packed integers, which read the same bytes, so that a tied embedding and head are stored
once; QMoE reads stacks of experts (`experts.py`):

    y = MatMulNBits(x [..., K], W [N, M, bytes], scales [N, M], zero points [N, packed M], bias [N])
    e = GatherBlockQuantized(E [V, bytes], ids, scales [V, M], zero points [V, packed M])

Standard operators, DequantizeLinear of a constant before MatMul, which compilers fuse:

    y = MatMul(x [..., K], DequantizeLinear(W [K, N], scales [M, N], zero points [M, N], axis=0, block_size=B))
    ids ─ Gather(E uint8 [V, M, B]) ─ DequantizeLinear(1, 128) ─┐
    ids ─ Gather(scales [V, M, 1]) ─────────────────────────── Mul ─ Reshape [B, S, K] ─ e

OpenVINO keeps the weights compressed. ONNX Runtime fuses the two nodes into MatMulNBits for the CPU provider, at
accuracy level 4 (optimizer/qdq_transformer/selectors_actions, DQMatMulToMatMulNBits). Embedding rows are looked up as
integers, because DequantizeLinear before Gather would dequantise the whole embedding in every step. DequantizeLinear
with scale 1 is a Cast and a Sub that compilers support; OpenVINO does not cast 8-bit integers from outside its compiled
part.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from partita.export.quantise import experts
from partita.export.quantise.forms import Form, LookUp, Place, Product, Weight, last
from partita.export.quantise.weight_source import InBlocks, InColumns, InRows

DOMAIN = "com.microsoft"
MATMUL, GATHER = "MatMulNBits", "GatherBlockQuantized"
EXACT_LEVEL = 0
"""The accuracy level without quantised activations."""
RESTORE = "DequantizeLinear"


def _nbits_product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
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


def _nbits_look_up(place: Place, ids: ir.Value, weight: Weight) -> ir.Value:
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


def _nbits_exact(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == MATMUL and node.domain == DOMAIN:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", EXACT_LEVEL)
    experts.make_exact(model)


def _dequantised_product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
    attributes = {"axis": 0, "block_size": weight.packing.block_size}
    scales = weight.values[1]
    restored = place.node(
        RESTORE, weight.values, dtype=scales.dtype, shape=[weight.width, weight.rows], attributes=attributes
    )
    shape = last(hidden, weight.rows)
    made = place.node("MatMul", [hidden, restored], dtype=hidden.dtype, shape=shape)
    return made if bias is None else place.node("Add", [made, bias], dtype=hidden.dtype, shape=shape)


def _dequantised_exact(model: ir.Model) -> None:
    """Count the axis from the end, which prevents the fusion by ONNX Runtime: the product runs in float32."""
    for node in model.graph:
        if node.op_type == RESTORE and "block_size" in node.attributes:
            node.attributes["axis"] = ir.AttrInt64("axis", -2)


def _look_up(place: Place, ids: ir.Value, weight: Weight) -> ir.Value:
    data, scales = weight.values
    assert ids.shape is not None and scales.dtype is not None
    before, kind = list(ids.shape), scales.dtype
    size = weight.packing.block_size
    blocks = [*before, weight.width // size, size]
    rows = place.node("Gather", [data, ids], dtype=data.dtype, shape=blocks)
    one = place.constant(np.array(1, kind.numpy()), f"rows.one.{kind.name.lower()}")
    middle = place.constant(np.array(weight.packing.grid.middle, np.uint8), "rows.middle")
    steps = place.node("DequantizeLinear", [rows, one, middle], dtype=kind, shape=blocks)
    factors = place.node("Gather", [scales, ids], dtype=kind, shape=[*blocks[:-1], 1])
    scaled = place.node("Mul", [steps, factors], dtype=kind, shape=blocks)
    # The batch is constant, the number of tokens may be symbolic.
    sizes = [size if isinstance(size, int) else -1 for size in (*before, weight.width)]
    shape = place.constant(np.array(sizes, np.int64), f"{data.name}.shape")
    return place.node("Reshape", [scaled, shape], dtype=kind, shape=[*before, weight.width])


LOOK_UP = LookUp(InBlocks(), _look_up, symmetric=True)
"""An 8-bit embedding in standard operators."""
FORMS = (
    Form(
        "matmul_nbits",
        "MatMulNBits and GatherBlockQuantized",
        Product(f"{MATMUL} ({DOMAIN})", InRows(), _nbits_product, _nbits_exact),
        LookUp(InRows(), _nbits_look_up),
        experts=True,
        domains=(DOMAIN,),
        fills_up=True,
    ),
    Form(
        "dequantize_linear",
        "DequantizeLinear before MatMul, in standard operators",
        Product(f"{RESTORE} of blocks and MatMul", InColumns(), _dequantised_product, _dequantised_exact),
        LOOK_UP,
        opset=21,
    ),
)
