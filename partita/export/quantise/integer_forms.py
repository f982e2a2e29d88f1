"""Products of 8-bit integers: activations are quantised with one scale per token, in standard operators.

    s = Max(ReduceMax(Abs(x)), tiny) / 127                        [..., 1]
    q = QuantizeLinear(x, s, 128)                                 [..., K] uint8, a scale along the axis of tokens

Products with the same x share s and q. QuantizeLinear reads x once, unlike Div, Round, Add and Cast. There are no Shape
nodes, because a provider may lack int64. The product, in standard operators for machines with an integer matrix unit,
or in ONNX Runtime's operator, which scales the result and so saves two passes over it:

    y = Cast(MatMulInteger(q, W [K, N], zero point 128)) * s * scales [N]
    y = MatMulIntegerToFloat(q, W [K, N], 1, scales [N], zero point 128) * s

DynamicQuantizeMatMul has one scale for all tokens, and the activations of a text's first token are hundreds of times
larger than the others. Weights are signed with one scale per output channel, as ONNX Runtime's matrix unit requires
(core/mlas, MlasGemm with a signed right side).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from partita.export.quantise.forms import DOMAIN, LOOK_UP, Form, Place, Product, Weight, last
from partita.export.quantise.weight_source import InColumns

STANDARD, FUSED = "MatMulInteger", "MatMulIntegerToFloat"
QUANTIZE, QUANTIZE_SINCE = "QuantizeLinear", 21
"""The operator, and the first operator set in which it has one scale per block, here a whole row."""
LARGEST, MIDDLE = 127, 128
"""Maximum of quantised activations, and their zero point."""
TINY = 1e-30
"""The scale of a row of zeros."""


def _rounded(place: Place, hidden: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
    """Integers and scales of activations with rows of `width`."""
    if hidden in place.shared:
        integers, scale = place.shared[hidden]
        return integers, scale
    assert hidden.dtype is not None
    kind, shape, one = hidden.dtype, hidden.shape, last(hidden, 1)

    def number(value: float, name: str) -> ir.Value:
        return place.constant(np.array(value, kind.numpy()), f"rounding.{name}")

    size = place.node("Abs", [hidden], dtype=kind, shape=shape)
    axes = place.constant(np.array([-1], np.int64), "rounding.axes")
    largest = place.node("ReduceMax", [size, axes], dtype=kind, shape=one, attributes={"keepdims": 1})
    positive = place.node("Max", [largest, number(TINY, "tiny")], dtype=kind, shape=one)
    scale = place.node("Mul", [positive, number(1 / LARGEST, "step")], dtype=kind, shape=one)
    axis, scales, attributes = _axis_of_tokens(hidden), scale, {"axis": -1, "block_size": width}
    if axis is not None:
        flat = place.constant(np.array([-1], np.int64), "rounding.to_minus_1")
        scales, attributes = place.node("Reshape", [scale, flat], dtype=kind, shape=None), {"axis": axis}
    inputs = [hidden, scales, _zero_points(place, hidden, scales)]
    integers = place.node(QUANTIZE, inputs, dtype=ir.DataType.UINT8, shape=shape, attributes=attributes)
    place.shared[hidden] = integers, scale
    return integers, scale


def _axis_of_tokens(hidden: ir.Value) -> int | None:
    """The only axis before the last that is longer than 1; None where there may be several."""
    if hidden.shape is None:
        return None
    long = [axis for axis, size in enumerate(hidden.shape[:-1]) if size != 1]
    return None if len(long) > 1 else long[0] if long else 0


def _zero_points(place: Place, hidden: ir.Value, scales: ir.Value) -> ir.Value:
    """Zero points, one per token, shared by activations with the same number of tokens."""
    sizes = () if hidden.shape is None else tuple(str(size) for size in hidden.shape[:-1])
    if sizes and set(sizes) == {"1"}:
        return place.constant(np.array([MIDDLE], np.uint8), "rounding.zero_point_of_one")
    if sizes in place.shared:
        return place.shared[sizes][0]
    assert scales.dtype is not None
    middle = place.constant(np.array(MIDDLE, scales.dtype.numpy()), "rounding.middle")
    same = place.node("Clip", [scales, middle, middle], dtype=scales.dtype, shape=scales.shape)
    byte = {"to": int(ir.DataType.UINT8)}
    made = place.node("Cast", [same], dtype=ir.DataType.UINT8, shape=scales.shape, attributes=byte)
    if sizes and "None" not in sizes:
        place.shared[sizes] = (made,)
    return made


def _product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight, *, fused: bool) -> ir.Value:
    """x W^T, by ONNX Runtime's operator if `fused`."""
    data, scales = weight.values
    assert hidden.dtype is not None
    integers, scale = _rounded(place, hidden, weight.width)
    shape, kind = last(hidden, weight.rows), hidden.dtype
    one = [place.constant(np.array(1, kind.numpy()), "rounding.one"), scales] if fused else []
    middle = place.constant(np.array(MIDDLE, np.uint8), "rounding.zero_point")
    inputs = [integers, data, *one, middle]
    if fused:
        made = place.node(FUSED, inputs, dtype=kind, shape=shape, domain=DOMAIN)
        return place.plus(place.node("Mul", [made, scale], dtype=kind, shape=shape), bias)
    whole = place.node(STANDARD, inputs, dtype=ir.DataType.INT32, shape=shape)
    made = place.node("Cast", [whole], dtype=kind, shape=shape, attributes={"to": int(kind)})
    made = place.node("Mul", [made, scale], dtype=kind, shape=shape)
    return place.plus(place.node("Mul", [made, scales], dtype=kind, shape=shape), bias)


def _exact(model: ir.Model) -> None:
    """Multiply x / s without rounding by the weights as floats."""
    for node in [node for node in model.graph if node.op_type in (STANDARD, FUSED)]:
        integers, data, *others = node.inputs
        result = node if node.op_type == FUSED else next(use.node for use in node.outputs[0].uses())
        (scaled,) = [use.node for use in result.outputs[0].uses()]
        quantise = None if integers is None else integers.producer()
        assert data is not None and quantise is not None and quantise.op_type == QUANTIZE
        steps = ir.node("Div", inputs=[quantise.inputs[0], scaled.inputs[1]], name=f"{node.name}.steps")
        wide = ir.node("Cast", inputs=[data], attributes={"to": int(ir.DataType.FLOAT)}, name=f"{node.name}.wide")
        written = [steps, wide]
        if node.op_type == FUSED:
            written.append(ir.node("Mul", inputs=[*wide.outputs, others[1]], name=f"{node.name}.weight"))
        inputs = [*steps.outputs, *written[-1].outputs]
        product = ir.node("MatMul", inputs=inputs, name=f"{node.name}.exact")
        for new in (*written, product):
            new.outputs[0].name = f"{new.name}.output"
            model.graph.insert_before(node, new)
        product.outputs[0].type, product.outputs[0].shape = result.outputs[0].type, result.outputs[0].shape
        result.outputs[0].replace_all_uses_with(product.outputs[0])
        model.graph.remove([node] if result is node else [result, node], safe=True)


def _form(name: str, operator: str, how: str, domains: tuple[str, ...]) -> Form:
    product = Product(
        f"{operator} over quantised activations",
        InColumns(one_scale=True),
        partial(_product, fused=bool(domains)),
        _exact,
    )
    summary = f"{operator} over activations quantised per token{how}"
    return Form(name, summary, product, LOOK_UP, opset=QUANTIZE_SINCE, domains=domains, one_scale=True)


FORMS = (
    _form("matmul_integer", STANDARD, ", in standard operators", ()),
    _form("matmul_integer_to_float", FUSED, "", (DOMAIN,)),
)
