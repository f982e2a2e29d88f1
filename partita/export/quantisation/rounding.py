"""Activations rounded to 8-bit integers by the graph itself, with a scale for every token, in standard operators.

    s = Max(ReduceMax(Abs(x)), tiny) / 127                        [..., 1]
    q = QuantizeLinear(x, s, 128)                                 [..., K] uint8, a scale along the axis of tokens

Products that read the same x share s and q. QuantizeLinear goes through x once where dividing, rounding, adding and
casting it go through it four times.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from partita.export.quantisation.forms.base import Place, last

QUANTIZE = "QuantizeLinear"
ROUNDED = "rounded"
ZERO_POINTS = "zero_points"
LARGEST, MIDDLE = 127, 128
"""Of rounded activations, and the number that stands for 0."""
TINY = 1e-30
"""In place of the scale of a row that is 0 everywhere."""


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
    """Activations [..., K] as integers, given the scale of each token [..., 1]. QuantizeLinear takes scales along one
    axis only, so tokens that lie along several, as those of a batch do, are put along one meanwhile.
    """
    kind, byte = hidden.dtype, ir.DataType.UINT8
    scales = place.node("Reshape", [scale, _sizes(place, [-1])], dtype=kind, shape=None)
    axis = _axis_of_tokens(hidden)
    if axis is not None:
        inputs = [hidden, scales, _zero_points(place, hidden, scales)]
        return place.node(QUANTIZE, inputs, dtype=byte, shape=hidden.shape, attributes={"axis": axis})
    rows = place.node("Reshape", [hidden, _sizes(place, [-1, width])], dtype=kind, shape=None)
    inputs = [rows, scales, _zero_points(place, hidden, scales)]
    flat = place.node(QUANTIZE, inputs, dtype=byte, shape=None, attributes={"axis": 0})
    sizes = place.node("Shape", [hidden], dtype=ir.DataType.INT64, shape=None)
    return place.node("Reshape", [flat, sizes], dtype=byte, shape=hidden.shape)


def _sizes(place: Place, sizes: list[int]) -> ir.Value:
    """A shape to reshape to."""
    return place.constant(np.array(sizes, np.int64), f"rounding.to_{'_'.join(map(str, sizes))}".replace("-", "minus_"))


def _axis_of_tokens(hidden: ir.Value) -> int | None:
    """The only axis before the last that is longer than 1; None where there may be several."""
    if hidden.shape is None:
        return None
    long = [axis for axis, size in enumerate(hidden.shape[:-1]) if size != 1]
    return None if len(long) > 1 else long[0] if long else 0


def _zero_points(place: Place, hidden: ir.Value, scales: ir.Value) -> ir.Value:
    """The number that stands for 0, once for every token; shared by all activations of as many tokens."""
    sizes = () if hidden.shape is None else tuple(str(size) for size in hidden.shape[:-1])
    known = place.shared.get((ZERO_POINTS, sizes))
    if known is not None:
        return known[0]
    count = place.node("Shape", [scales], dtype=ir.DataType.INT64, shape=None)
    made = place.node("Expand", [zero_point(place), count], dtype=ir.DataType.UINT8, shape=None)
    if sizes and "None" not in sizes:
        place.shared[ZERO_POINTS, sizes] = (made,)
    return made


def zero_point(place: Place) -> ir.Value:
    """It, once."""
    return place.constant(np.array(MIDDLE, np.uint8), "rounding.zero_point")


def before_rounding(integers: ir.Value | None) -> ir.Value:
    """The activations that were rounded to `integers`, as `_integers` writes it."""
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
