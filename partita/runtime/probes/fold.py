"""Values that are known once the sizes of the inputs are: what ONNX Runtime folds into constants when shapes are fixed.

Shape arithmetic such as Shape, Gather, Concat before a Reshape. A node with fixed sizes has to be tried with such
inputs as constants, because that is what it would get.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partita.runtime.probes.constants import constant_of
from partita.runtime.tensor_types import is_fixed, is_small

if TYPE_CHECKING:
    import onnx

MOST_ELEMENTS = 256
"""Of a value that is kept."""
MOST_MADE = 1 << 22
"""Elements that may be made to find out."""
FOLDED = frozenset(
    {
        "Abs",
        "Add",
        "Cast",
        "Ceil",
        "Concat",
        "Div",
        "Equal",
        "Expand",
        "Floor",
        "Gather",
        "GatherElements",
        "GatherND",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "Less",
        "LessOrEqual",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Not",
        "Range",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "Reshape",
        "ScatterElements",
        "Slice",
        "Split",
        "Squeeze",
        "Sub",
        "Tile",
        "Unsqueeze",
        "Where",
    }
)
"""Operators of shape arithmetic."""


def known_values(proto: onnx.ModelProto, fixed: Mapping[str, onnx.TypeProto]) -> dict[str, onnx.TensorProto]:
    """Small tensors of the main graph that follow from the sizes; constants of the file are not among them.

    `fixed`: types with the sizes of the run; with none, only what follows from constants alone is known.
    """
    import onnx

    values: dict[str, Any] = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in proto.graph.initializer
        if is_small(tensor) and tensor.data_type != onnx.TensorProto.STRING
    }
    given = frozenset(values)
    for node in proto.graph.node:
        if node.domain:
            continue
        made = _evaluate(proto, node, values, fixed)
        values.update(zip(node.output, made, strict=False))
    kept = {name: value for name, value in values.items() if name and name not in given}
    return {name: onnx.numpy_helper.from_array(value, name) for name, value in kept.items()}


def _evaluate(
    proto: onnx.ModelProto, node: onnx.NodeProto, values: Mapping[str, Any], fixed: Mapping[str, onnx.TypeProto]
) -> tuple[Any, ...]:
    """The outputs of a node when they are known; empty otherwise."""
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator

    if node.op_type in ("Shape", "Size"):
        kind = fixed.get(node.input[0])
        if kind is None or not is_fixed(kind):
            return ()
        sizes = [size.dim_value for size in kind.tensor_type.shape.dim]
        return (np.array(_slice_of(node, sizes) if node.op_type == "Shape" else math.prod(sizes), np.int64),)
    if node.op_type == "Constant":
        value = constant_of(node)
        small = value is not None and is_small(value) and value.data_type != onnx.TensorProto.STRING
        return (onnx.numpy_helper.to_array(value),) if value is not None and small else ()
    if node.op_type not in FOLDED or any(name and name not in values for name in node.input):
        return ()
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    try:
        if _may_be_large(node, [values[name] for name in node.input if name]):
            return ()
        made = ReferenceEvaluator(node, opsets=opsets).run(None, {name: values[name] for name in node.input if name})
    except Exception:  # noqa: BLE001 - a value that is not known costs an experiment, and the evaluator raises anything
        return ()
    return tuple(np.asarray(value) for value in made) if all(np.size(value) <= MOST_ELEMENTS for value in made) else ()


def _may_be_large(node: onnx.NodeProto, inputs: Sequence[Any]) -> bool:
    """Whether what a node makes may be too large to be made at all: a mask of 32,768 by 32,768 is 8 GiB."""
    import numpy as np

    if node.op_type == "Expand":
        return _product(inputs[1]) > MOST_ELEMENTS
    if node.op_type == "Tile":
        return np.size(inputs[0]) * _product(inputs[1]) > MOST_ELEMENTS
    if node.op_type == "Range":
        start, limit, delta = (float(np.ravel(value)[0]) for value in inputs)
        return not delta or (limit - start) / delta > MOST_ELEMENTS
    largest = sorted((np.size(value) for value in inputs), reverse=True)[:2]  # of two that are spread over each other
    return math.prod(largest) > MOST_MADE


def _product(sizes: Any) -> float:
    """Of sizes, without an overflow."""
    return math.prod(float(size) for size in sizes.ravel())


def _slice_of(node: onnx.NodeProto, sizes: list[int]) -> list[int]:
    """The sizes from attribute start to attribute end of a Shape."""
    limits = {entry.name: entry.i for entry in node.attribute}
    return sizes[limits.get("start", 0) : limits.get("end", len(sizes))]
