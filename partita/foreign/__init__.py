"""Foreign folders: a contract inferred for folders of other exporters, so that they can be used like packages.

Here: the contents of an ONNX file as plain data, read without its weights. They are the input of the inference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from partita import dtypes
from partita.package.folder import path_inside

if TYPE_CHECKING:
    import onnx

Size = int | str | None
"""A size of a shape: a number, the name of a symbolic size, or None."""


@dataclass(frozen=True, slots=True)
class PortFact:
    """An input or output of the main graph."""

    name: str
    dtype: str
    """Element type in ONNX's spelling; empty for other types than tensors."""
    shape: tuple[Size, ...] | None
    """None where the rank is unknown."""

    @property
    def declared(self) -> str:
        """Name, type and shape for messages: `past.0.key float32[batch,2,past,16]`."""
        if self.shape is None:
            return f"{self.name} {self.dtype} of unknown rank"
        return f"{self.name} {self.dtype}[{','.join('?' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True, slots=True)
class NodeFact:
    """A node of the main graph."""

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int | float | str | tuple[int, ...]] = field(default_factory=dict)
    """Attributes that are numbers, integer lists, or strings."""
    subgraph_inputs: frozenset[str] = frozenset()
    """Tensors of the main graph that its subgraphs read."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One ONNX file."""

    file: str
    """Relative to the folder, with / as separator."""
    inputs: tuple[PortFact, ...]
    outputs: tuple[PortFact, ...]
    nodes: tuple[NodeFact, ...]
    """Nodes of the main graph."""
    node_count: int
    """Number of nodes, subgraphs included."""
    opsets: Mapping[str, int]
    producer: str
    defaults: tuple[PortFact, ...] = ()
    """Float inputs with a default value in the file."""
    empty: frozenset[str] = frozenset()
    """Names of those with an empty default: a size is 0."""
    integer_constants: Mapping[str, int] = field(default_factory=dict)
    """Scalar integer constants."""
    compared: frozenset[int] = frozenset()
    """Absolute values of integers that nodes of any graph in the file add, subtract, divide by or compare with; 0 where
    it contains a mask of all positions."""
    data_files: tuple[str, ...] = ()
    """Relative to the folder."""
    weight_bytes: int = 0
    weights: Mapping[str, int] = field(default_factory=dict)
    """Number of stored elements by type."""
    operators: Mapping[str, int] = field(default_factory=dict)
    """Number of nodes by operator, subgraphs included; domain.operator for other domains than ONNX's."""
    quantised_products: Mapping[int, int] = field(default_factory=dict)
    """Products with quantised weights by bits, subgraphs included."""

    def producer_of(self, tensor: str) -> NodeFact | None:
        """The node that computes a tensor; None for inputs and constants."""
        return next((node for node in self.nodes if tensor in node.outputs), None)

    def readers_of(self, tensor: str) -> list[NodeFact]:
        """The nodes that read a tensor, without duplicates, also in their subgraphs."""
        return [node for node in self.nodes if tensor in node.inputs or tensor in node.subgraph_inputs]

    def input(self, name: str) -> PortFact | None:
        """The input of that name."""
        return _named(self.inputs, name)

    def output(self, name: str) -> PortFact | None:
        """The output of that name."""
        return _named(self.outputs, name)


def _named(ports: Iterable[PortFact], name: str) -> PortFact | None:
    return next((port for port in ports if port.name == name), None)


ONNX_DOMAINS = ("", "ai.onnx")
PACKED = "MatMulNBits"
PASS_THROUGH = frozenset({"Cast", "Identity", "Neg", "Squeeze", "Unsqueeze", "Reshape", "Expand"})
COMPARING = frozenset(
    ("Add", "Sub", "Div", "Mod", "Max", "Min", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Trilu")
)
"""Operators with which a graph may limit attention to a window or a chunk."""


def read_graph(folder: Path, file: str) -> GraphFacts:
    """The facts of `file`. Raises PackageError when missing or damaged."""
    # imported here, because `partita.load` must run before ONNX Runtime is loaded
    from partita.runtime.place.model_file import all_graphs, all_nodes, all_tensors
    from partita.runtime.place.onnx_model import read_onnx

    model = read_onnx(path_inside(folder, file))
    proto, within = model.proto, PurePosixPath(file).parent
    stored = Counter[str]()
    for tensor in all_tensors(proto):
        stored[_dtype(tensor.data_type)] += math.prod(tensor.dims)
    constants = {tensor.name for tensor in proto.graph.initializer}
    defaults = tuple(_port(port) for port in proto.graph.input if port.name in constants)
    every = list(all_nodes(proto.graph))
    operators = [("" if node.domain in ONNX_DOMAINS else node.domain, node.op_type) for node in every]
    packed = [node for node in every if node.op_type == PACKED]  # whose default is 4 bits
    bits = [next((int(each.i) for each in node.attribute if each.name == "bits"), 4) for node in packed]
    return GraphFacts(
        file=file,
        inputs=tuple(_port(port) for port in proto.graph.input if port.name not in constants),
        outputs=tuple(_port(port) for port in proto.graph.output),
        defaults=tuple(port for port in defaults if port.dtype in ("float32", "float16")),
        empty=frozenset(tensor.name for tensor in proto.graph.initializer if 0 in tensor.dims),
        integer_constants=dict(
            filter(None, (_stored_integer(name, tensor) for name, tensor in _constants(proto.graph)))
        ),
        compared=_compared([*all_graphs(proto.graph), *proto.functions]),
        nodes=tuple(map(_node, proto.graph.node)),
        node_count=len(model.nodes) + len(model.subgraph_nodes),
        opsets=dict(model.opsets),
        producer=" ".join(filter(None, (proto.producer_name, proto.producer_version))),
        data_files=tuple(str(within / name) for name in model.data_files),
        weight_bytes=model.weight_bytes,
        weights=dict(stored),
        operators=dict(Counter(f"{domain}.{name}" if domain else name for domain, name in operators)),
        quantised_products=dict(Counter(bits)),
    )


def _dtype(number: int) -> str:
    """The name of an element type; empty for an unknown one."""
    try:
        return dtypes.dtype_numbered(number).name
    except ValueError:
        return ""


def _constants(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Names and values of a graph's constants, in all forms that exporters use."""
    from onnx import TensorProto, helper

    yield from ((tensor.name, tensor) for tensor in getattr(graph, "initializer", ()))
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" and node.output else ():
            if attribute.name == "value":
                yield node.output[0], attribute.t
            elif attribute.name in ("value_int", "value_ints"):
                values = list(attribute.ints) or [attribute.i]
                yield node.output[0], helper.make_tensor(node.output[0], TensorProto.INT64, [len(values)], values)


def _stored_integer(name: str, tensor: onnx.TensorProto) -> tuple[str, int] | None:
    """Name and value of a scalar integer constant stored in the file itself."""
    from onnx import numpy_helper

    if _dtype(tensor.data_type) not in ("int64", "int32") or any(size != 1 for size in tensor.dims):
        return None
    if tensor.external_data:
        return None
    try:
        return name, int(numpy_helper.to_array(tensor).reshape(()))
    except ValueError:  # missing bytes are reported when the file is opened
        return None


def _compared(graphs: Sequence[onnx.GraphProto | onnx.FunctionProto]) -> frozenset[int]:
    """`GraphFacts.compared` of the graphs and functions of a file."""
    constants = [named for graph in graphs for named in _constants(graph)]
    whole = dict(filter(None, (_stored_integer(name, tensor) for name, tensor in constants)))
    found = {0} if any(_is_mask(tensor) for _, tensor in constants) else set[int]()
    for node in (node for graph in graphs for node in graph.node):
        numbers = [whole[name] for name in node.input if name in whole]
        if node.op_type in PASS_THROUGH and node.input[0] in whole:
            whole[node.output[0]] = -numbers[0] if node.op_type == "Neg" else numbers[0]
        elif node.op_type in COMPARING:
            found.update(map(abs, numbers))
        elif node.op_type == "Slice":  # of the last keys; slices of a head start at 0 or above
            found.update(-number for number in numbers if number < -1)
    return frozenset(found)


def _is_mask(tensor: onnx.TensorProto) -> bool:
    """Whether a constant may be a mask over pairs of positions."""
    square = len(tensor.dims) > 1 and tensor.dims[-1] == tensor.dims[-2] > 1
    return square and (_dtype(tensor.data_type) == "bool" or len(tensor.dims) > 3)


def _port(port: onnx.ValueInfoProto) -> PortFact:
    if port.type.WhichOneof("value") != "tensor_type":
        return PortFact(port.name, "", None)
    tensor = port.type.tensor_type
    sizes: list[Size] = []
    for size in tensor.shape.dim:  # some exporters write negative sizes for unknown ones
        known = size.HasField("dim_value")
        sizes.append((size.dim_value if size.dim_value >= 0 else None) if known else size.dim_param or None)
    return PortFact(port.name, _dtype(tensor.elem_type), tuple(sizes) if tensor.HasField("shape") else None)


def _node(node: onnx.NodeProto) -> NodeFact:
    from partita.runtime.place.model_file import subgraphs_of, tensors_read

    inner = frozenset(tensors_read(node)) - set(node.input) if any(True for _ in subgraphs_of(node)) else frozenset()
    return NodeFact(
        node.op_type,
        node.domain,
        tuple(node.input),
        tuple(node.output),
        dict(filter(None, map(_attribute_value, node.attribute))),
        inner,
    )


def _attribute_value(attribute: onnx.AttributeProto) -> tuple[str, int | float | str | tuple[int, ...]] | None:
    """Name and value of an attribute that is a number, an integer list, or a string."""
    if attribute.HasField("i"):
        return attribute.name, int(attribute.i)
    if attribute.HasField("f"):
        return attribute.name, float(attribute.f)
    if attribute.HasField("s"):
        return attribute.name, attribute.s.decode(errors="replace")
    return (attribute.name, tuple(attribute.ints)) if attribute.ints else None
