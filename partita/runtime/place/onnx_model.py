"""Reads and checks any ONNX model before ONNX Runtime opens it, and gives every node a unique name.

ONNX Runtime rejects duplicate node names, and its logs name unnamed nodes inconsistently. Such nodes get a name in a
copy in memory; the file does not change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partita import dtypes
from partita.errors import PackageError
from partita.observations.facts import GraphNode
from partita.package.folder import GET_AGAIN
from partita.runtime.place.model_file import (
    all_graphs,
    all_nodes,
    all_tensors,
    check_external_data,
    data_files,
    graph_nodes,
    inner_nodes,
    parse_model,
    tensor_bytes,
)

if TYPE_CHECKING:
    import onnx

CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that would break ONNX Runtime's log lines."""


@dataclass(frozen=True, slots=True)
class ModelPort:
    """An input of the main graph, as declared in the file."""

    name: str
    kind: str
    """tensor, sequence, optional, map or sparse tensor; unknown if not declared."""
    dtype: str
    """Element type, e.g. float32; for non-tensors, the kind."""
    shape: tuple[int | str | None, ...] | None
    """Fixed sizes, names of symbolic sizes, None for unnamed sizes; None for an unknown rank."""

    @property
    def declared(self) -> str:
        """Type and shape as text: `float32[batch,3,?,?]`."""
        if self.shape is None:
            return f"{self.dtype}, of unknown rank"
        return f"{self.dtype}[{','.join('?' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """Structure of one ONNX file."""

    path: Path
    proto: onnx.ModelProto
    """With unique node names, without external data."""
    renamed: bool
    """Whether nodes were renamed, so that ONNX Runtime has to open `proto` instead of the file."""
    nodes: tuple[GraphNode, ...]
    """Nodes of the main graph."""
    subgraph_nodes: tuple[GraphNode, ...]
    """Nodes in control-flow subgraphs."""
    inputs: tuple[ModelPort, ...]
    outputs: tuple[str, ...]
    constants: frozenset[str]
    """Tensors of the main graph whose values are in the file."""
    opsets: Mapping[str, int]
    data_files: tuple[str, ...]
    data_folder: Path | None
    """Folder of the external data; None: that of the file."""
    weight_bytes: int
    notes: tuple[str, ...]
    """Notes about renamed nodes."""

    def to_bytes(self) -> bytes | None:
        """The model to open instead of the file; None if the file can be opened."""
        return self.proto.SerializeToString() if self.renamed or self.data_folder is not None else None


def read_onnx(path: Path, data_folder: Path | None = None) -> OnnxModel:
    """Read and check the ONNX file `path`, without its external data, which is in its folder or in `data_folder`.

    Raises PackageError when it is missing, damaged or not an ONNX file, or its weights are missing or outside that
    folder.
    """
    proto = parse_model(path)
    if not proto.graph.node:
        raise PackageError(f"{path}: its graph has no nodes, so there is nothing to place")
    try:
        return _describe(path, proto, data_folder)
    except (TypeError, ValueError, KeyError) as error:  # e.g. a type that ONNX does not define
        message = f"{path}: damaged: it can be parsed, but not processed ({error})"
        raise PackageError(message, remedy=GET_AGAIN) from error


def _describe(path: Path, proto: onnx.ModelProto, data_folder: Path | None) -> OnnxModel:
    """Structure of a parsed model. Raises PackageError for its weights, TypeError or ValueError if it is damaged."""
    check_external_data(proto, path, data_folder or path.parent)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    initializers |= {sparse.values.name for sparse in proto.graph.sparse_initializer}
    notes = _name_nodes(proto)
    return OnnxModel(
        path=path,
        proto=proto,
        renamed=bool(notes),
        nodes=graph_nodes(proto.graph),
        subgraph_nodes=inner_nodes(proto.graph),
        inputs=tuple(read_port(port) for port in proto.graph.input if port.name not in initializers),
        outputs=tuple(read_port(port).name for port in proto.graph.output),
        constants=frozenset(initializers).union(
            output for node in proto.graph.node if node.op_type == "Constant" for output in node.output
        ),
        opsets={entry.domain: entry.version for entry in proto.opset_import},
        data_files=tuple(sorted(data_files(proto))),
        data_folder=data_folder,
        weight_bytes=sum(tensor_bytes(tensor) for tensor in all_tensors(proto)),
        notes=notes,
    )


def read_port(port: onnx.ValueInfoProto) -> ModelPort:
    """An input or output of a graph. Raises ValueError for an element type that ONNX does not define."""
    kind = (port.type.WhichOneof("value") or "unknown").removesuffix("_type").replace("_", " ")
    if kind != "tensor":
        return ModelPort(port.name, kind, kind, None)
    tensor = port.type.tensor_type
    dtype = dtypes.dtype_numbered(tensor.elem_type).name if tensor.elem_type else "unknown"
    if not tensor.HasField("shape"):
        return ModelPort(port.name, kind, dtype, None)
    sizes = [size.dim_value if size.HasField("dim_value") else size.dim_param or None for size in tensor.shape.dim]
    # Some exporters write unknown sizes as negative numbers.
    return ModelPort(port.name, kind, dtype, tuple(None if isinstance(s, int) and s < 0 else s for s in sizes))


def _name_nodes(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Give every node of the graph and of each function a unique name on one line; return a note about the changes.

    ONNX Runtime names inlined nodes after the function's nodes, so unnamed ones would have blank names in logs.
    """
    changed, names = 0, ([node.name for node in graph.node if node.name] for graph in all_graphs(proto.graph))
    refused = any(len(listed) > len(set(listed)) for listed in names)
    for scope in (proto.graph, *proto.functions):
        nodes = list(all_nodes(scope))
        before = [node.name for node in nodes]
        for node in nodes:
            node.name = CONTROL.sub("_", node.name)
        names_in_use = {node.name for node in nodes}
        seen: set[str] = set()
        for position, node in enumerate(nodes):
            if not node.name or node.name in seen:
                node.name = f"{node.name or node.op_type}_{position}"
                while node.name in names_in_use:
                    node.name += "_"
                names_in_use.add(node.name)
            seen.add(node.name)
        changed += sum(node.name != name for node, name in zip(nodes, before, strict=True))
    if not changed:
        return ()
    named = "have a name of their own here: <name or operator>_<position>, without control characters"
    note = f"nodes without a unique name in the file ({changed}) {named}"
    return (f"{note}; ONNX Runtime does not load the file as it is" if refused else note,)
