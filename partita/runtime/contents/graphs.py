"""One ONNX file for `inspect`: operators, inputs and outputs, operator sets, stored tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from partita.errors import PackageError
from partita.inspection.records import GraphFacts, OperatorCount, PortFacts
from partita.package.contract import Contract
from partita.package.folder import path_inside, refuse_absent, unreadable
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.contents.modules import UNKNOWN, TensorEntry, Weight, initializers, weights_in
from partita.runtime.place.model_file import all_nodes, check_external_data, data_files, read_light
from partita.runtime.place.onnx_model import read_port

if TYPE_CHECKING:
    import onnx

MAIN = ("", "ai.onnx")
"""Domains of ONNX's own operators."""


@dataclass(frozen=True, slots=True)
class ReadGraph:
    """The facts and stored tensors of an ONNX file."""

    facts: GraphFacts
    tensors: tuple[TensorEntry, ...]
    """Every stored tensor, including those in subgraphs and constants."""
    weights: tuple[Weight, ...]
    data_error: PackageError | None
    """The error of its external data, if any."""


def read_graph(folder: Path, name: str, contract: Contract | None, data_folder: Path | None = None) -> ReadGraph:
    """Read the ONNX file `name` of a folder; its external data is in its folder or in `data_folder`.

    Raises PackageError if it is missing, damaged or unreadable.
    """
    path = path_inside(folder, name)
    home = (data_folder or path.parent).relative_to(folder).as_posix()
    if not path.is_file():
        raise PackageError(f"{path}: missing from the package", remedy=FROM_CHECKPOINT)
    refuse_absent(path)
    try:
        proto = read_light(path)
        tensors = tuple(initializers(proto.graph, name, home))
        facts = _facts(path, name, home, proto, contract)
        weights = weights_in(proto, tensors)
    except PermissionError as error:
        raise unreadable(path) from error
    except (TypeError, ValueError, OSError) as error:
        raise PackageError(f"{path}: not a readable ONNX file ({error})", remedy=FROM_CHECKPOINT) from error
    data_error = None
    try:
        check_external_data(proto, path, folder / home)
    except PackageError as error:
        data_error = error
    return ReadGraph(facts, tuple(tensor for _, tensor in tensors), weights, data_error)


def _facts(path: Path, name: str, home: str, proto: onnx.ModelProto, contract: Contract | None) -> GraphFacts:
    """The facts of the file and of its entry in the contract. `home`: folder of the external data."""
    graph = proto.graph
    known = None if contract is None else next((file for file in contract.files if file.file == name), None)
    states = set() if contract is None else {port for state in contract.states for port in (state.past, state.present)}
    roles = {} if known is None else {port.name: port.role for port in (*known.inputs, *known.outputs)}
    hidden = states | {tensor.name for tensor in graph.initializer}
    inputs, outputs = (
        tuple(_port(port, roles.get(port.name)) for port in listed if port.name not in hidden)
        for listed in (graph.input, graph.output)
    )
    return GraphFacts(
        file=name,
        size_bytes=path.stat().st_size,
        phase=None if known is None else known.phase,
        sequence_length=None if known is None else known.sequence_length,
        ir_version=proto.ir_version,
        producer=" ".join(filter(None, (proto.producer_name, proto.producer_version))),
        opsets={"" if entry.domain in MAIN else entry.domain: entry.version for entry in proto.opset_import},
        nodes=len(graph.node),
        subgraph_nodes=sum(1 for _ in all_nodes(graph)) - len(graph.node),
        functions=len(proto.functions),
        operators=_operators(proto),
        inputs=inputs,
        outputs=outputs,
        data_files=tuple(sorted(str(PurePosixPath(home, location)) for location in data_files(proto))),
        metadata={entry.key: entry.value for entry in proto.metadata_props},
    )


def _operators(proto: onnx.ModelProto) -> tuple[OperatorCount, ...]:
    """Nodes per operator, subgraphs included; sorted by domain, then by frequency."""
    counted = Counter(("" if node.domain in MAIN else node.domain, node.op_type) for node in all_nodes(proto.graph))
    ranked = sorted(counted.items(), key=lambda entry: (entry[0][0], -entry[1], entry[0][1]))
    return tuple(OperatorCount(domain=domain, operator=name, nodes=nodes) for (domain, name), nodes in ranked)


def _port(declared: onnx.ValueInfoProto, role: str | None) -> PortFacts:
    """An input or output."""
    port = read_port(declared)
    dtype = port.dtype if port.kind == "tensor" and port.dtype != UNKNOWN else None
    return PortFacts(name=port.name, dtype=dtype, shape=port.shape, role=role)
