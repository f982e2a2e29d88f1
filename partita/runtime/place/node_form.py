"""Facts of nodes that may select a kernel: attributes, element types, constants, head size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from partita import dtypes
from partita.observations.facts import GraphNode

if TYPE_CHECKING:
    import onnx

HEADS = "num_heads"
"""Attribute of attention operators with heads in the last axis."""
STEP = 8
"""Element multiple of fused attention kernels."""
Tensor = tuple[str, tuple[int, ...]]
"""Element type, and sizes with 0 for a symbolic one."""


def with_forms(graph: onnx.GraphProto, nodes: Iterable[GraphNode]) -> tuple[GraphNode, ...]:
    """The nodes of a graph, in its order, with their `form`."""
    constants = {tensor.name: (_type(tensor.data_type), tuple(tensor.dims)) for tensor in graph.initializer}
    known = {port.name: _declared_tensor(port) for port in (*graph.value_info, *graph.output, *graph.input)} | constants
    return tuple(
        replace(made, form=tuple(_form(node, known, constants).items()))
        for node, made in zip(graph.node, nodes, strict=True)
    )


def _form(node: onnx.NodeProto, known: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> dict[str, str]:
    """The facts of one node, in the words of `KernelRow`."""
    facts = {each.name: _value(each) for each in node.attribute if each.type in (each.INT, each.STRING) or each.f}
    for place, name in enumerate(node.input):
        if not name:
            continue
        facts[f"input{place}"] = known[name][0] if name in known else "unknown"
        if name in constants:
            facts[f"constant{place}"] = "yes"
            facts[f"rank{place}"] = str(len(constants[name][1]))
    if size := _head_size(node, facts, known):
        facts["head_size%8"] = str(size % STEP)
    return facts


def _head_size(node: onnx.NodeProto, facts: Mapping[str, str], known: Mapping[str, Tensor]) -> int:
    """Head size of an attention node, from a 4-D input, else from the width of separate queries; 0 if unknown."""
    if HEADS not in facts or len(node.input) < 2:
        return 0
    shapes = [known[name][1] for name in node.input if name in known]
    whole = [shape[-1] for shape in shapes if len(shape) == 4]
    if whole:
        return whole[0]
    query = known.get(node.input[0], ("", ()))[1]
    return query[-1] // int(facts[HEADS]) if len(query) == 3 and node.input[1] else 0


def _value(attribute: onnx.AttributeProto) -> str:
    """A number or text as text."""
    if attribute.type == attribute.STRING:
        return attribute.s.decode("utf-8", errors="replace")
    return str(attribute.i) if attribute.type == attribute.INT else f"{attribute.f:g}"


def _declared_tensor(port: onnx.ValueInfoProto) -> Tensor:
    """Type and shape of a declared tensor."""
    tensor = port.type.tensor_type
    return _type(tensor.elem_type), tuple(size.dim_value for size in tensor.shape.dim)


def _type(number: int) -> str:
    """Name of an element type; `unknown` for none."""
    return dtypes.name_of(number) if number else "unknown"
