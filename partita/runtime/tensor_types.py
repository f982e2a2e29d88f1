"""Type and shape of every tensor of a graph: what the file declares, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from partita.runtime.lab.schema import find_operator
from partita.runtime.model_file import all_graphs

if TYPE_CHECKING:
    import onnx

MOST_ROUNDS = 8
"""Rounds in which types spread over operators that the onnx package does not know."""
SMALL_BYTES = 64 << 10
"""Larger constants have no say in types and shapes, and stay on disk."""


def tensor_types(
    proto: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, onnx.TypeProto]:
    """Types by tensor name, also of tensors in bodies. `inputs`: sizes of graph inputs, in place of the declared ones.

    What an operator unknown to the onnx package makes has no type, unless the file declares it.
    """

    light = _weightless(proto)
    if inputs is not None:
        _fix_inputs(light, inputs)
    inferred = _infer(light)
    for _ in range(MOST_ROUNDS):
        if not _spread_elements(inferred) and not _look_into_functions(inferred):
            break
        inferred = _infer(inferred)
    types: dict[str, onnx.TypeProto] = {}
    for graph in reversed(list(all_graphs(inferred.graph))):  # a name of the main graph means that one
        types |= {port.name: port.type for port in (*graph.value_info, *graph.output, *graph.input)}
        types |= {tensor.name: tensor_type(tensor.data_type, tensor.dims) for tensor in graph.initializer}
    return {name: entry for name, entry in types.items() if entry.WhichOneof("value")}


def _infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with what the onnx package infers of its types; as it is where that fails, or would end the process."""
    import onnx

    if any(_ends_inference(node) for graph in all_graphs(model.graph) for node in graph.node):
        return model
    try:
        made: onnx.ModelProto = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return model
    return made


def _ends_inference(node: onnx.NodeProto) -> bool:
    """Whether the onnx package, to whose native code nobody promised a legal node, reads beyond its memory over it.

    A Split into another number of outputs than it has; seen with onnx 1.23.
    """
    wanted = next((entry.i for entry in node.attribute if entry.name == "num_outputs"), None)
    return node.op_type == "Split" and wanted is not None and wanted != len(node.output)


def _spread_elements(model: onnx.ModelProto) -> bool:
    """Give outputs of operators that the onnx package does not know the element type that their schema gives them.

    Their shapes stay unknown. Returns whether any was found.
    """
    graph = model.graph
    known = {port.name: port.type for port in (*graph.value_info, *graph.output, *graph.input)}
    elements = {name: kind.tensor_type.elem_type for name, kind in known.items() if kind.HasField("tensor_type")}
    elements |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    versions = {entry.domain: entry.version for entry in model.opset_import}
    found = False
    for node in graph.node:
        if not node.domain or all(elements.get(name) for name in node.output if name):
            continue
        operator = find_operator(node.domain, node.op_type, versions.get(node.domain, 1))
        for name, element in operator.outputs_of(node, elements).items() if operator is not None else ():
            if not elements.get(name):
                elements[name] = element
                graph.value_info.add(name=name).type.tensor_type.elem_type = element
                found = True
    return found


def _look_into_functions(model: onnx.ModelProto) -> bool:
    """Give outputs of operators for which the onnx package has no rule, and a function, what follows from the function:
    GroupNormalization, say. Returns whether any was found.
    """
    import onnx
    import onnx.inliner

    graph = model.graph
    known = {port.name for port in (*graph.value_info, *graph.output, *graph.input) if _is_typed(port.type)}
    versions = {entry.domain: entry.version for entry in model.opset_import}
    lacking = {
        (node.domain, node.op_type)
        for node in graph.node
        if any(name and name not in known for name in node.output) and _has_function_only(node, versions)
    }
    if not lacking:
        return False
    asked = onnx.ModelProto()
    asked.CopyFrom(model)
    for tensor in graph.initializer:  # a function may depend on their types
        asked.graph.value_info.add(name=tensor.name, type=tensor_type(tensor.data_type, tensor.dims))
    try:
        unfolded = _infer(onnx.inliner.inline_selected_functions(asked, sorted(lacking), False, True))
    except Exception:  # noqa: BLE001 - native code that raises anything; the types stay unknown
        return False
    made = {name for node in graph.node for name in node.output if name} - known
    found = [port for port in (*unfolded.graph.value_info, *unfolded.graph.output) if port.name in made]
    stale = {port.name: port for port in graph.output}
    for port in (port for port in found if _is_typed(port.type)):
        if port.name in stale:
            stale[port.name].type.CopyFrom(port.type)
        else:
            graph.value_info.add(name=port.name).type.CopyFrom(port.type)
    return any(_is_typed(port.type) for port in found)


def _is_typed(kind: onnx.TypeProto) -> bool:
    """Whether more is known of a type than that it is one."""
    return kind.WhichOneof("value") is not None


def _has_function_only(node: onnx.NodeProto, versions: Mapping[str, int]) -> bool:
    """Whether ONNX describes the operator by other operators, and has no rule for its types."""
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, versions.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return False
    described = any(getattr(schema, name, False) for name in ("has_function", "has_context_dependent_function"))
    return described and not schema.has_type_and_shape_inference_function


def _fix_inputs(model: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> None:
    """Give graph inputs their sizes, and forget what was derived from the old ones."""
    for port in model.graph.input:
        if port.name in inputs and port.type.WhichOneof("value") == "tensor_type":
            port.type.CopyFrom(tensor_type(port.type.tensor_type.elem_type, inputs[port.name]))
    for port in (*model.graph.value_info, *model.graph.output):
        if port.type.WhichOneof("value") == "tensor_type":
            for size in port.type.tensor_type.shape.dim:
                if size.HasField("dim_param"):
                    size.ClearField("dim_param")


def _weightless(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which large initializers are graph inputs of the same type."""
    import onnx

    light = onnx.ModelProto(ir_version=proto.ir_version)
    light.opset_import.extend(proto.opset_import)
    light.functions.extend(proto.functions)
    graph = light.graph
    graph.name = proto.graph.name or "graph"
    graph.node.extend(proto.graph.node)
    graph.input.extend(proto.graph.input)
    graph.output.extend(proto.graph.output)
    graph.value_info.extend(proto.graph.value_info)
    declared = {port.name for port in graph.input}
    for tensor in proto.graph.initializer:
        if is_small(tensor):
            graph.initializer.add().CopyFrom(tensor)
        elif tensor.name not in declared:
            graph.input.add(name=tensor.name, type=tensor_type(tensor.data_type, tensor.dims))
    return light


def is_small(tensor: onnx.TensorProto) -> bool:
    """Its values are in the file, and few."""
    return not tensor.external_data and tensor.ByteSize() <= SMALL_BYTES


def tensor_type(element: int, sizes: object) -> onnx.TypeProto:
    """A tensor type of these sizes."""
    import onnx

    made: onnx.TypeProto = onnx.helper.make_tensor_type_proto(element, list(sizes))  # type: ignore[call-overload]
    return made


def is_fixed(kind: onnx.TypeProto | None) -> bool:
    """True for a tensor whose every size is a number. ONNX Runtime reads one below 0 as one that is not known."""
    if kind is None or kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.HasField("shape"):
        return False
    return all(size.HasField("dim_value") and size.dim_value >= 0 for size in kind.tensor_type.shape.dim)


def element_of(kind: onnx.TypeProto) -> int | None:
    """Element type; None for what is no tensor."""
    return kind.tensor_type.elem_type if kind.WhichOneof("value") == "tensor_type" else None


def sizes_of(kind: onnx.TypeProto | None) -> tuple[int, ...] | None:
    """Sizes of a tensor whose every size is known; None for others."""
    if kind is None or not is_fixed(kind):
        return None
    return tuple(size.dim_value for size in kind.tensor_type.shape.dim)


def rank_of(kind: onnx.TypeProto | None) -> int | None:
    """How many dimensions a tensor has; None where that is not known, and for what is no tensor."""
    if kind is None or kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.HasField("shape"):
        return None
    return len(kind.tensor_type.shape.dim)


def padded_sizes(kind: onnx.TypeProto) -> tuple[int, ...]:
    """Sizes of a tensor with 1 in place of each that is 0 or not known; empty where the rank is not known, too."""
    if kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.HasField("shape"):
        return ()
    return tuple(max(size.dim_value, 0) or 1 for size in kind.tensor_type.shape.dim)


def with_element(kind: onnx.TypeProto, element: int) -> onnx.TypeProto:
    """The tensor type with another element type."""
    import onnx

    copy = onnx.TypeProto()
    copy.CopyFrom(kind)
    copy.tensor_type.elem_type = element
    return copy
