"""Constants of a graph, and small tensors that depend only on the sizes of its inputs.

ONNX Runtime folds shape arithmetic (Shape, Gather, Concat before a Reshape) once sizes are fixed, so a node with fixed
sizes is tested with such inputs as constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from partita.runtime.place.model_file import all_graphs, all_nodes
from partita.runtime.place.tensor_types import is_fixed, is_small

if TYPE_CHECKING:
    import onnx

MOST_ELEMENTS = 256
"""Maximum elements of a stored value."""
MOST_MADE = 1 << 22
"""Maximum elements computed during evaluation."""
SHAPE_ARITHMETIC = """
Abs Add Cast Ceil Concat Div Equal Expand Floor Gather GatherElements GatherND Greater GreaterOrEqual Identity Less
LessOrEqual Max Min Mod Mul Neg Not Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape ScatterElements Slice Split
Squeeze Sub Tile Unsqueeze Where
"""
FOLDED = frozenset(SHAPE_ARITHMETIC.split())
OVERRIDABLE_SINCE = 4
"""IR version since which an initializer that is also a graph input is that input's default; before, every initializer
had to be an input (onnx/docs/IR.md, and Graph::CanOverrideInitializer in onnxruntime/core/graph/graph.h)."""


def find_constants(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Constants by name: dense and sparse initializers, and outputs of Constant nodes."""
    found = {tensor.name: tensor for graph in all_graphs(proto.graph) for tensor in graph.initializer}
    for graph in all_graphs(proto.graph):
        found |= {sparse.values.name: _dense_zeros(sparse) for sparse in graph.sparse_initializer}
    for node in all_nodes(proto.graph):
        value = constant_of(node)
        if value is not None:
            found[node.output[0]] = value
    return found


def without_defaults(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """The model without initializers that are also graph inputs, and these initializers."""
    inputs = {port.name for port in proto.graph.input}
    defaults = {tensor.name: tensor for tensor in proto.graph.initializer if tensor.name in inputs}
    if proto.ir_version < OVERRIDABLE_SINCE or not defaults:
        return proto, {}
    bare = deepcopy(proto)
    kept = [tensor for tensor in bare.graph.initializer if tensor.name not in defaults]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    return bare, defaults


def constant_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The tensor of a Constant node; None for other nodes, and for non-tensor values."""
    import numpy as np
    import onnx

    if node.op_type != "Constant" or node.domain or not node.output or not node.attribute:
        return None
    (attribute,) = node.attribute[:1]
    value = onnx.helper.get_attribute_value(attribute)
    match attribute.name:
        case "value":
            tensor: onnx.TensorProto = attribute.t
            return tensor
        case "value_float" | "value_floats":
            return onnx.numpy_helper.from_array(np.array(value, np.float32), node.output[0])
        case "value_int" | "value_ints":
            return onnx.numpy_helper.from_array(np.array(value, np.int64), node.output[0])
        case "value_string" | "value_strings":
            return onnx.numpy_helper.from_array(np.array(value, object), node.output[0])
        case "sparse_value":
            return _dense_zeros(attribute.sparse_tensor)
    return None


def _dense_zeros(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """A sparse constant as dense zeros; no provider's placement depends on values."""
    import onnx

    width = onnx.helper.tensor_dtype_to_np_dtype(sparse.values.data_type).itemsize
    return onnx.TensorProto(
        name=sparse.values.name,
        data_type=sparse.values.data_type,
        dims=list(sparse.dims),
        raw_data=bytes(width * math.prod(sparse.dims)),
    )


def known_values(proto: onnx.ModelProto, fixed: Mapping[str, onnx.TypeProto]) -> dict[str, onnx.TensorProto]:
    """Small tensors of the main graph that depend only on sizes, without the file's constants.

    `fixed`: types with the sizes of the run; without any, only values that depend on constants alone are known.
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
    """The outputs of a node if known, else empty."""
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator

    if node.op_type in ("Shape", "Size"):
        kind = fixed.get(node.input[0])
        if kind is None or not is_fixed(kind):
            return ()
        sizes = [size.dim_value for size in kind.tensor_type.shape.dim]
        limits = {entry.name: entry.i for entry in node.attribute}
        part = sizes[limits.get("start", 0) : limits.get("end", len(sizes))]
        return (np.array(part if node.op_type == "Shape" else math.prod(sizes), np.int64),)
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
    except Exception:  # noqa: BLE001 - the evaluator may raise any exception; an unknown value costs an experiment
        return ()
    return tuple(np.asarray(value) for value in made) if all(np.size(value) <= MOST_ELEMENTS for value in made) else ()


def _may_be_large(node: onnx.NodeProto, inputs: Sequence[Any]) -> bool:
    """Whether a node's output may be too large to compute, e.g. a mask of 32,768 by 32,768 (8 GiB)."""
    import numpy as np

    if node.op_type == "Expand":
        return _product(inputs[1]) > MOST_ELEMENTS
    if node.op_type == "Tile":
        return np.size(inputs[0]) * _product(inputs[1]) > MOST_ELEMENTS
    if node.op_type == "Range":
        start, limit, delta = (float(np.ravel(value)[0]) for value in inputs)
        return not delta or (limit - start) / delta > MOST_ELEMENTS
    largest = sorted((np.size(value) for value in inputs), reverse=True)[:2]  # two operands that are broadcast
    return math.prod(largest) > MOST_MADE


def _product(sizes: Any) -> float:
    """The product of sizes, without an overflow."""
    return math.prod(float(size) for size in sizes.ravel())
