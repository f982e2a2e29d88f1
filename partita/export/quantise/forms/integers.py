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

import numpy as np
import onnx_ir as ir

from partita.export.quantise.forms import Form, Place, Product, Weight, last
from partita.export.quantise.forms.blocks import DOMAIN, LOOK_UP
from partita.export.quantise.weight_source import InColumns

STANDARD, FUSED = "MatMulInteger", "MatMulIntegerToFloat"
QUANTIZE = "QuantizeLinear"
ROUNDED = "rounded"
ZERO_POINTS = "zero_points"
LARGEST, MIDDLE = 127, 128
"""Maximum of quantised activations, and their zero point."""
BLOCKS_SINCE = 21
"""The first operator set of ONNX in which QuantizeLinear supports one scale per block, here a whole row."""
TINY = 1e-30
"""The scale of a row of zeros."""


def rounded(place: Place, hidden: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
    """Integers and scales of activations with rows of `width`."""
    known = place.shared.get((ROUNDED, hidden))
    if known is not None:
        return known[0], known[1]
    assert hidden.dtype is not None
    kind, shape, one = hidden.dtype, hidden.shape, last(hidden, 1)

    def number(value: float, name: str) -> ir.Value:
        return place.constant(np.array(value, kind.numpy()), f"rounding.{name}")

    size = place.node("Abs", [hidden], dtype=kind, shape=shape)
    axes = place.constant(np.array([-1], np.int64), "rounding.axes")
    largest = place.node("ReduceMax", [size, axes], dtype=kind, shape=one, attributes={"keepdims": 1})
    positive = place.node("Max", [largest, number(TINY, "tiny")], dtype=kind, shape=one)
    scale = place.node("Mul", [positive, number(1 / LARGEST, "step")], dtype=kind, shape=one)
    place.shared[ROUNDED, hidden] = integers, scale = _integers(place, hidden, scale, width), scale
    return integers, scale


def _integers(place: Place, hidden: ir.Value, scale: ir.Value, width: int) -> ir.Value:
    """Activations [..., K] as integers, given the scale of each token [..., 1]."""
    axis, byte = _axis_of_tokens(hidden), ir.DataType.UINT8
    if axis is not None:
        scales = place.node("Reshape", [scale, _sizes(place, [-1])], dtype=hidden.dtype, shape=None)
        inputs, attributes = [hidden, scales, _zero_points(place, hidden, scales)], {"axis": axis}
    elif (place.graph.opset_imports.get("") or 0) >= BLOCKS_SINCE:
        inputs, attributes = [hidden, scale, _zero_points(place, hidden, scale)], {"axis": -1, "block_size": width}
    else:
        return _flat_integers(place, hidden, scale, width)
    return place.node(QUANTIZE, inputs, dtype=byte, shape=hidden.shape, attributes=attributes)


def _flat_integers(place: Place, hidden: ir.Value, scale: ir.Value, width: int) -> ir.Value:
    """`_integers` for tokens along several axes."""
    kind, byte = hidden.dtype, ir.DataType.UINT8
    scales, rows = (
        place.node("Reshape", [value, _sizes(place, sizes)], dtype=kind, shape=None)
        for value, sizes in ((scale, [-1]), (hidden, [-1, width]))
    )
    inputs = [rows, scales, _zero_points(place, hidden, scales)]
    flat = place.node(QUANTIZE, inputs, dtype=byte, shape=None, attributes={"axis": 0})
    sizes = place.node("Shape", [hidden], dtype=ir.DataType.INT64, shape=None)
    return place.node("Reshape", [flat, sizes], dtype=byte, shape=hidden.shape)


def _sizes(place: Place, sizes: list[int]) -> ir.Value:
    """The target of a Reshape."""
    return place.constant(np.array(sizes, np.int64), f"rounding.to_{'_'.join(map(str, sizes))}".replace("-", "minus_"))


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
    known = place.shared.get((ZERO_POINTS, sizes))
    if known is not None:
        return known[0]
    assert scales.dtype is not None
    middle = place.constant(np.array(MIDDLE, scales.dtype.numpy()), "rounding.middle")
    same = place.node("Clip", [scales, middle, middle], dtype=scales.dtype, shape=scales.shape)
    byte = {"to": int(ir.DataType.UINT8)}
    made = place.node("Cast", [same], dtype=ir.DataType.UINT8, shape=scales.shape, attributes=byte)
    if sizes and "None" not in sizes:
        place.shared[ZERO_POINTS, sizes] = (made,)
    return made


def zero_point(place: Place) -> ir.Value:
    """The zero point as a scalar."""
    return place.constant(np.array(MIDDLE, np.uint8), "rounding.zero_point")


def before_rounding(integers: ir.Value | None) -> ir.Value:
    """The activations from which `_integers` computed `integers`."""
    operators = ("Reshape", QUANTIZE, "Reshape") if _made_by(integers).op_type == "Reshape" else (QUANTIZE,)
    value = integers
    for operator in operators:
        node = _made_by(value)
        assert node.op_type == operator, operator
        value = node.inputs[0]
    assert value is not None
    return value


def _made_by(value: ir.Value | None) -> ir.Node:
    node = None if value is None else value.producer()
    assert node is not None
    return node


def _standard_product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
    data, scales = weight.values
    assert hidden.dtype is not None
    integers, scale = rounded(place, hidden, weight.width)
    shape, kind = last(hidden, weight.rows), hidden.dtype
    whole = place.node(STANDARD, [integers, data, zero_point(place)], dtype=ir.DataType.INT32, shape=shape)
    made = place.node("Cast", [whole], dtype=kind, shape=shape, attributes={"to": int(kind)})
    made = place.node("Mul", [made, scale], dtype=kind, shape=shape)
    made = place.node("Mul", [made, scales], dtype=kind, shape=shape)
    return made if bias is None else place.node("Add", [made, bias], dtype=kind, shape=shape)


def _fused_product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
    data, scales = weight.values
    assert hidden.dtype is not None
    integers, scale = rounded(place, hidden, weight.width)
    shape, kind = last(hidden, weight.rows), hidden.dtype
    one = place.constant(np.array(1, kind.numpy()), "rounding.one")
    made = place.node(FUSED, [integers, data, one, scales, zero_point(place)], dtype=kind, shape=shape, domain=DOMAIN)
    made = place.node("Mul", [made, scale], dtype=kind, shape=shape)
    return made if bias is None else place.node("Add", [made, bias], dtype=kind, shape=shape)


def _exact(model: ir.Model) -> None:
    """Multiply x / s without rounding by the weights as floats."""
    for node in [node for node in model.graph if node.op_type in (STANDARD, FUSED)]:
        integers, data, *others = node.inputs
        result = node if node.op_type == FUSED else next(use.node for use in node.outputs[0].uses())
        (scaled,) = [use.node for use in result.outputs[0].uses()]
        assert data is not None
        steps = ir.node("Div", inputs=[before_rounding(integers), scaled.inputs[1]], name=f"{node.name}.steps")
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


FORMS = (
    Form(
        "matmul_integer",
        "MatMulInteger over activations quantised per token, in standard operators",
        Product(f"{STANDARD} over quantised activations", InColumns(one_scale=True), _standard_product, _exact),
        LOOK_UP,
        opset=18,
        bits=(8,),
        one_scale=True,
    ),
    Form(
        "matmul_integer_to_float",
        "MatMulIntegerToFloat over activations quantised per token",
        Product(f"{FUSED} ({DOMAIN}) over quantised activations", InColumns(one_scale=True), _fused_product, _exact),
        LOOK_UP,
        opset=18,
        domains=(DOMAIN,),
        bits=(8,),
        one_scale=True,
    ),
)
