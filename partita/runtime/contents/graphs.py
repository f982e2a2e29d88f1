"""One ONNX file as `inspect` shows it: operators, inputs and outputs, operator sets, where its weights lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partita import dtypes
from partita.contract import Contract, GraphFile
from partita.errors import PackageError
from partita.inspection.records import GraphFacts, OperatorCount, PortFacts, Size
from partita.package import inside, refuse_absent, unreadable
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.contents.light import read_light
from partita.runtime.contents.modules import Weight, weights_in
from partita.runtime.contents.tensors import Stored, beside, initializers
from partita.runtime.model_file import all_nodes, data_files

if TYPE_CHECKING:
    import onnx

MAIN = ("", "ai.onnx")
"""What the operator set of ONNX itself is called."""


@dataclass(frozen=True, slots=True)
class ReadGraph:
    """An ONNX file that was read."""

    facts: GraphFacts
    tensors: tuple[Stored, ...]
    """Everything that it has stored, in bodies and in constants, too."""
    weights: tuple[Weight, ...]


def read_graph(folder: Path, name: str, contract: Contract | None) -> ReadGraph:
    """Read the ONNX file `name` of a folder. Raises PackageError when it is missing, damaged, or not to be read."""
    path = inside(folder, name)
    if not path.is_file():
        raise PackageError(f"{path}: missing from the package", remedy=FROM_CHECKPOINT)
    refuse_absent(path)
    try:
        proto = read_light(path)
        facts, tensors = _facts(path, name, proto, contract), tuple(initializers(proto.graph, name))
        return ReadGraph(facts, tuple(tensor for _, tensor in tensors), weights_in(proto, tensors))
    except PermissionError as error:
        raise unreadable(path) from error
    except (TypeError, ValueError, OSError) as error:  # e.g. a name that is not UTF-8, which protobuf has as bytes
        raise PackageError(f"{path}: not a readable ONNX file ({error})", remedy=FROM_CHECKPOINT) from error


def _facts(path: Path, name: str, proto: onnx.ModelProto, contract: Contract | None) -> GraphFacts:
    """What the file says of itself, with what the contract says of it."""
    graph = proto.graph
    known = None if contract is None else next((file for file in contract.files if file.file == name), None)
    states = set() if contract is None else {port for state in contract.states for port in (state.past, state.present)}
    roles = _roles(known)
    given = {tensor.name for tensor in graph.initializer}
    ports = (
        [_port(port, roles) for port in listed if port.name not in states | given]
        for listed in (graph.input, graph.output)
    )
    inputs, outputs = ports
    total = sum(1 for _ in all_nodes(graph))
    return GraphFacts(
        file=name,
        size_bytes=path.stat().st_size,
        phase=None if known is None else known.phase,
        sequence_length=None if known is None else known.sequence_length,
        ir_version=proto.ir_version,
        producer=" ".join(filter(None, (proto.producer_name, proto.producer_version))),
        opsets={"" if entry.domain in MAIN else entry.domain: entry.version for entry in proto.opset_import},
        nodes=len(graph.node),
        inner_nodes=total - len(graph.node),
        functions=len(proto.functions),
        operators=_operators(proto),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        data_files=tuple(sorted(beside(name, location) for location in data_files(proto))),
        metadata={entry.key: entry.value for entry in proto.metadata_props},
    )


def _roles(file: GraphFile | None) -> Mapping[str, str]:
    """Roles of inputs and outputs by name."""
    return {} if file is None else {port.name: port.role for port in (*file.inputs, *file.outputs)}


def _operators(proto: onnx.ModelProto) -> tuple[OperatorCount, ...]:
    """Nodes by operator, those in bodies included; domains by name, the most frequent operator of each first."""
    counted = Counter(("" if node.domain in MAIN else node.domain, node.op_type) for node in all_nodes(proto.graph))
    ranked = sorted(counted.items(), key=lambda entry: (entry[0][0], -entry[1], entry[0][1]))
    return tuple(OperatorCount(domain=domain, operator=name, nodes=nodes) for (domain, name), nodes in ranked)


def _port(port: onnx.ValueInfoProto, roles: Mapping[str, str]) -> PortFacts:
    """An input or output."""
    role = roles.get(port.name)
    if port.type.WhichOneof("value") != "tensor_type":
        return PortFacts(name=port.name, dtype=None, shape=None, role=role)
    tensor = port.type.tensor_type
    shape = tuple(_size(size) for size in tensor.shape.dim) if tensor.HasField("shape") else None
    dtype = dtypes.numbered(tensor.elem_type).name if tensor.elem_type else None
    return PortFacts(name=port.name, dtype=dtype, shape=shape, role=role)


def _size(size: onnx.TensorShapeProto.Dimension) -> Size:
    """A size of a shape. Negative ones are how some exporters write that they do not know."""
    if size.HasField("dim_value"):
        return size.dim_value if size.dim_value >= 0 else None
    if not isinstance(size.dim_param, str):  # bytes, where it is not UTF-8
        raise ValueError(f"the name of a dimension is not UTF-8: {size.dim_param!r}")
    return size.dim_param or None
