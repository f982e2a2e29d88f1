"""Type and shape of every tensor of a graph, declared or inferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from partita.runtime.lab.schema import element_in, find_operator
from partita.runtime.ort.registry import output_types
from partita.runtime.place.model_file import all_graphs, defines, tensors_read

if TYPE_CHECKING:
    import onnx

MOST_ROUNDS = 8
"""Maximum rounds of inference over operators unknown to the onnx package."""
SAME_TYPE = frozenset({"GroupNormalization", "MeanVarianceNormalization"})
"""ONNX operators that the onnx package (1.23) defines without type inference; the output has the type of the input."""
SMALL_BYTES = 64 << 10
"""Maximum elements of constants that take part in shape inference."""


def tensor_types(
    proto: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]] | None = None, *, by_runtime: bool = False
) -> dict[str, onnx.TypeProto]:
    """Types by tensor name, including subgraphs.

    Args:
        inputs: Sizes of graph inputs that replace the declared ones.
        by_runtime: Whether ONNX Runtime infers the outputs of operators that the onnx package does not have. In this
            process: only for nodes that ONNX Runtime has opened before. If not, they have an element type at most.
    """
    light = _weightless(proto)
    if inputs is not None:
        _fix_inputs(light, inputs)
    inferred = _infer(light)
    for _ in range(MOST_ROUNDS):
        if not _spread_elements(inferred, by_runtime=by_runtime):
            break
        inferred = _infer(inferred)
    types: dict[str, onnx.TypeProto] = {}
    for graph in reversed(list(all_graphs(inferred.graph))):  # names of the main graph take precedence
        types |= {port.name: port.type for port in (*graph.value_info, *graph.output, *graph.input)}
        types |= {tensor.name: tensor_type(tensor.data_type, tensor.dims) for tensor in graph.initializer}
    return {name: entry for name, entry in types.items() if entry.WhichOneof("value")}


def fixed_shapes(proto: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Tensors of the main graph with declared shapes, or shapes inferred from the inputs."""
    types = tensor_types(proto, inputs)
    return frozenset(name for name in defines(proto.graph) if is_fixed(types.get(name)))


def _infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with inferred types; unchanged if inference fails or would crash."""
    import onnx

    splits = (node for graph in all_graphs(model.graph) for node in graph.node if node.op_type == "Split")
    for node in splits:  # a wrong `num_outputs` crashes the onnx package (1.23)
        if any(entry.name == "num_outputs" and entry.i != len(node.output) for entry in node.attribute):
            return model
    try:
        made: onnx.ModelProto = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return model
    return made


def _spread_elements(model: onnx.ModelProto, *, by_runtime: bool) -> bool:
    """Set output types that the onnx package does not infer; return whether any was set."""
    import onnx

    graph = model.graph
    known = {port.name: port.type for port in (*graph.value_info, *graph.output, *graph.input)}
    elements = {name: kind.tensor_type.elem_type for name, kind in known.items() if kind.HasField("tensor_type")}
    elements |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    versions = {entry.domain: entry.version for entry in model.opset_import}
    outputs = {port.name: port for port in graph.output}
    found = False

    def add(name: str, kind: onnx.TypeProto) -> None:
        nonlocal found
        if not elements.get(name):
            port = outputs[name] if name in outputs else graph.value_info.add(name=name)
            port.type.CopyFrom(kind)
            known[name], elements[name], found = kind, kind.tensor_type.elem_type, True

    for node in graph.node:
        if all(elements.get(name) for name in node.output if name):
            continue
        if not node.domain and node.op_type in SAME_TYPE:
            for source, made in zip(node.input[:1], node.output, strict=False):
                if elements.get(source) and source in known:
                    add(made, known[source])
        elif node.domain or not onnx.defs.has(node.op_type, versions.get("", 1), ""):
            for name, kind in _types_by_runtime(model, node, known).items() if by_runtime else ():
                add(name, kind)
            operator = find_operator(node.domain, node.op_type, versions.get(node.domain, 1))
            for name, element in operator.outputs_of(node, elements).items() if operator is not None else ():
                add(name, onnx.helper.make_tensor_type_proto(element, None))
    return found


def _types_by_runtime(
    model: onnx.ModelProto, node: onnx.NodeProto, known: Mapping[str, onnx.TypeProto]
) -> dict[str, onnx.TypeProto]:
    """Types of a node's outputs as ONNX Runtime infers them; empty where an input's type or a kernel is missing."""
    import onnx

    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    fed = dict.fromkeys(name for name in tensors_read(node) if name not in constants)
    if any(element_of(known[name]) is None if name in known else True for name in fed):
        return {}
    single = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    single.graph.name = "single"
    single.graph.node.add().CopyFrom(node)
    single.graph.input.extend(onnx.ValueInfoProto(name=name, type=known[name]) for name in fed)
    single.graph.initializer.extend(constants[name] for name in dict.fromkeys(tensors_read(node)) if name in constants)
    single.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    found = {}
    for name, (text, sizes) in output_types(single.SerializeToString(deterministic=True)).items():
        element = element_in(text)
        if element is not None:
            found[name] = onnx.helper.make_tensor_type_proto(element.number, sizes)
    for name in _without_rank(single, found):
        found[name].tensor_type.ClearField("shape")
    return found


def _without_rank(single: onnx.ModelProto, found: Mapping[str, onnx.TypeProto]) -> list[str]:
    """Outputs without a rank. ONNX Runtime shows them like scalars, but keeps a declared shape only without a rank."""
    declared = {port.name: port for port in single.graph.output if sizes_of(found.get(port.name)) == ()}
    for name, port in declared.items():
        port.type.CopyFrom(tensor_type(found[name].tensor_type.elem_type, (1,)))
    shown = output_types(single.SerializeToString(deterministic=True)) if declared else {}
    return [name for name in declared if name in shown and shown[name][1] == [1]]


def _fix_inputs(model: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> None:
    """Set the sizes of graph inputs, and remove symbolic sizes derived from the old sizes."""
    for port in model.graph.input:
        if port.name in inputs and port.type.WhichOneof("value") == "tensor_type":
            port.type.CopyFrom(tensor_type(port.type.tensor_type.elem_type, inputs[port.name]))
    for port in (*model.graph.value_info, *model.graph.output):
        if port.type.WhichOneof("value") == "tensor_type":
            for size in port.type.tensor_type.shape.dim:
                if size.HasField("dim_param"):
                    size.ClearField("dim_param")


def _weightless(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with large initializers replaced by graph inputs of the same type."""
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
    """Whether the values are few and in the file."""
    return not tensor.external_data and tensor.ByteSize() <= SMALL_BYTES


def tensor_type(element: int, sizes: object) -> onnx.TypeProto:
    """A tensor type of these sizes."""
    import onnx

    made: onnx.TypeProto = onnx.helper.make_tensor_type_proto(element, list(sizes))  # type: ignore[call-overload]
    return made


def element_of(kind: onnx.TypeProto) -> int | None:
    """Element type; None for a non-tensor type."""
    return kind.tensor_type.elem_type if kind.WhichOneof("value") == "tensor_type" else None


def _dimensions(kind: onnx.TypeProto | None) -> Sequence[onnx.TensorShapeProto.Dimension] | None:
    """Dimensions of a tensor; None for an unknown rank or a non-tensor type."""
    if kind is None or kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.HasField("shape"):
        return None
    dimensions: Sequence[onnx.TensorShapeProto.Dimension] = kind.tensor_type.shape.dim
    return dimensions


def rank_of(kind: onnx.TypeProto | None) -> int | None:
    """Rank of a tensor; None if unknown."""
    dimensions = _dimensions(kind)
    return None if dimensions is None else len(dimensions)


def sizes_of(kind: onnx.TypeProto | None) -> tuple[int, ...] | None:
    """Sizes of a tensor; None unless all are known. As in ONNX Runtime, negative sizes are unknown."""
    dimensions = _dimensions(kind)
    if dimensions is None or not all(size.HasField("dim_value") and size.dim_value >= 0 for size in dimensions):
        return None
    return tuple(size.dim_value for size in dimensions)


def is_fixed(kind: onnx.TypeProto | None) -> bool:
    """Whether all sizes of a tensor are known."""
    return sizes_of(kind) is not None


def padded_sizes(kind: onnx.TypeProto) -> tuple[int, ...]:
    """Sizes of a tensor with 1 for zero or unknown sizes; empty for an unknown rank."""
    return tuple(max(size.dim_value, 0) or 1 for size in _dimensions(kind) or ())


def with_element(kind: onnx.TypeProto, element: int) -> onnx.TypeProto:
    """The tensor type with another element type."""
    import onnx

    copy = onnx.TypeProto()
    copy.CopyFrom(kind)
    copy.tensor_type.elem_type = element
    return copy
