"""Every constant of a graph as a tensor, however the file writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partita.runtime.model_file import all_graphs, all_nodes

if TYPE_CHECKING:
    import onnx


OVERRIDABLE_SINCE = 4
"""IR version from which an initializer that is a graph input as well is the default of that input; before, every
initializer had to be one (onnx/docs/IR.md, and Graph::CanOverrideInitializer in onnxruntime/core/graph/graph.h)."""


def find_constants(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Constants by name: initializers, dense or sparse, and what Constant nodes make."""
    found = {tensor.name: tensor for graph in all_graphs(proto.graph) for tensor in graph.initializer}
    for graph in all_graphs(proto.graph):
        found |= {sparse.values.name: _dense_zeros(sparse) for sparse in graph.sparse_initializer}
    for node in all_nodes(proto.graph):
        value = constant_of(node)
        if value is not None:
            found[node.output[0]] = value
    return found


def without_defaults(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """The model without initializers that are graph inputs as well, and these.

    Whoever runs the model may give others, so ONNX Runtime and its providers take them for inputs like all others.
    """
    import onnx

    inputs = {port.name for port in proto.graph.input}
    defaults = {tensor.name: tensor for tensor in proto.graph.initializer if tensor.name in inputs}
    if proto.ir_version < OVERRIDABLE_SINCE or not defaults:
        return proto, {}
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    kept = [tensor for tensor in bare.graph.initializer if tensor.name not in defaults]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    return bare, defaults


def constant_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The tensor that a Constant node makes; None for another node, and for values that are no tensor."""
    import numpy as np
    import onnx

    if node.op_type != "Constant" or node.domain or not node.output or not node.attribute:
        return None
    (attribute,) = node.attribute[:1]
    value = onnx.helper.get_attribute_value(attribute)
    match attribute.name:
        case "value":
            return _tensor_of(attribute)
        case "value_float" | "value_floats":
            return onnx.numpy_helper.from_array(np.array(value, np.float32), node.output[0])
        case "value_int" | "value_ints":
            return onnx.numpy_helper.from_array(np.array(value, np.int64), node.output[0])
        case "value_string" | "value_strings":
            return onnx.numpy_helper.from_array(np.array(value, object), node.output[0])
        case "sparse_value":
            return _dense_zeros(attribute.sparse_tensor)
    return None


def _tensor_of(attribute: onnx.AttributeProto) -> onnx.TensorProto:
    tensor: onnx.TensorProto = attribute.t
    return tensor


def _dense_zeros(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """A sparse constant as a dense one of zeros: placement was not seen to depend on values."""
    import math

    import onnx

    width = onnx.helper.tensor_dtype_to_np_dtype(sparse.values.data_type).itemsize
    return onnx.TensorProto(
        name=sparse.values.name,
        data_type=sparse.values.data_type,
        dims=list(sparse.dims),
        raw_data=bytes(width * math.prod(sparse.dims)),
    )
