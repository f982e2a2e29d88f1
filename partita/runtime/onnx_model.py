"""Any ONNX model: read and checked before ONNX Runtime sees it, and every node with a name of its own.

ONNX Runtime refuses a graph with two nodes of one name, and calls nodes without a name by another name in each of its
sources. So nodes that need it get a name, in a copy in memory; the file stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partita import dtypes
from partita.errors import PackageError
from partita.observations.facts import GraphNode
from partita.observations.text_format import plural
from partita.package import refuse_absent, unreadable
from partita.runtime.model_file import (
    all_graphs,
    all_nodes,
    all_tensors,
    bytes_for_text,
    check_external_data,
    data_files,
    defines,
    graph_node,
    inner_nodes,
)
from partita.strangers import recognise

if TYPE_CHECKING:
    import onnx

PROTOBUF_LIMIT_BYTES = 2**31 - 1
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
DIVIDING: Mapping[str, tuple[int, ...]] = {
    "Div": (1,),
    "Mod": (1,),
    "Range": (2,),
    "Slice": (4,),
    "OneHot": (1,),
    "Resize": (2, 3),
    "Upsample": (1,),
    "GroupQueryAttention": (6,),
    "DFT": (1,),
    "STFT": (1, 3),
    "HannWindow": (0,),
    "HammingWindow": (0,),
    "BlackmanWindow": (0,),
    "MelWeightMatrix": (0, 1, 2),
}
"""Inputs that must not be zero, by operator: divisors, steps, scales and lengths."""
AXES: Mapping[str, tuple[int, int]] = {"DFT": (2, -2)}
"""Inputs for which an operator has another default than zero: where, and which. Along the first dimension, the batch, a
DFT of one sample has no samples when it is inverse and one-sided, and that kernel of ONNX Runtime 1.27 never ends."""
AGAIN = "get the file again"
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters with which a name is no longer on one line of ONNX Runtime's log."""


@dataclass(frozen=True, slots=True)
class ModelPort:
    """An input of the main graph, as the file declares it."""

    name: str
    kind: str
    """What it holds: tensor, sequence, optional, map, sparse tensor; unknown when the file does not say."""
    dtype: str
    """Element type in ONNX's spelling, e.g. float32; of a tensor only."""
    shape: tuple[int | str | None, ...] | None
    """Fixed sizes, names of symbolic ones, None for those without a name; None as a whole when the rank is unknown."""

    @property
    def declared(self) -> str:
        """Type and shape for people: `float32[batch,3,?,?]`."""
        if self.shape is None:
            return f"{self.dtype}, of unknown rank"
        return f"{self.dtype}[{','.join('?' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """Structure of one ONNX file."""

    path: Path
    proto: onnx.ModelProto
    """With the names that nodes were given; weights outside the file are not in it."""
    renamed: bool
    """Some nodes were given names: what ONNX Runtime opens has to be `proto`, not the file."""
    nodes: tuple[GraphNode, ...]
    """Of the main graph."""
    inner: tuple[GraphNode, ...]
    """In control-flow subgraphs."""
    inputs: tuple[ModelPort, ...]
    outputs: tuple[str, ...]
    constants: frozenset[str]
    """Tensors of the main graph whose values stand in the file."""
    opsets: Mapping[str, int]
    data_files: tuple[str, ...]
    weight_bytes: int
    notes: tuple[str, ...]
    """What cannot be told apart or joined, one sentence each."""

    @property
    def fitting(self) -> Mapping[str, int]:
        """Tensors for which zero would not do, and the value that does: by which a node divides, steps or scales, or
        which are a length or an axis.
        """
        nodes = (*self.nodes, *self.inner)
        ones = (
            (name, 1)
            for node in nodes
            for position in DIVIDING.get(node.op_type, ())
            for name in node.inputs[position : position + 1]
        )
        axes = (
            (name, AXES[node.op_type][1])
            for node in nodes
            if node.op_type in AXES
            for name in node.inputs[AXES[node.op_type][0] :][:1]
        )
        return {**dict(axes), **dict(ones)}

    def to_bytes(self) -> bytes | None:
        """The model to open in place of the file; None when the file is good as it is."""
        return self.proto.SerializeToString() if self.renamed else None


def read_onnx(path: Path) -> OnnxModel:
    """Read and check the ONNX file `path`; weights that lie outside of it stay on disk.

    Raises PackageError when it is missing, damaged or no ONNX file, or its weights are missing or outside its folder.
    """
    proto = _parse(path)
    bad = bytes_for_text(proto)
    if bad:
        raise PackageError(f"{path}: damaged: its {bad} is not UTF-8; {AGAIN}")
    try:
        return _describe(path, proto)
    except (TypeError, ValueError, KeyError) as error:  # e.g. a type that ONNX does not have
        raise PackageError(f"{path}: damaged: it can be parsed, but not read ({error}); {AGAIN}") from error


def _describe(path: Path, proto: onnx.ModelProto) -> OnnxModel:
    """Structure of a parsed model. Raises PackageError for its weights, TypeError or ValueError where it is damaged."""
    check_external_data(proto, path, path.parent)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    initializers |= {sparse.values.name for sparse in proto.graph.sparse_initializer}
    named, notes = _name_nodes(proto.graph)
    in_functions, more = _name_in_functions(proto)
    return OnnxModel(
        path=path,
        proto=proto,
        renamed=named + in_functions > 0,
        nodes=tuple(graph_node(node) for node in proto.graph.node),
        inner=inner_nodes(proto.graph),
        inputs=tuple(read_port(port) for port in proto.graph.input if port.name not in initializers),
        outputs=tuple(read_port(port).name for port in proto.graph.output),
        constants=frozenset(initializers).union(
            output for node in proto.graph.node if node.op_type == "Constant" for output in node.output
        ),
        opsets={entry.domain: entry.version for entry in proto.opset_import},
        data_files=tuple(sorted(data_files(proto))),
        weight_bytes=sum(_tensor_bytes(tensor) for tensor in all_tensors(proto)),
        notes=(*notes, *more, *_structure_notes(proto)),
    )


def _parse(path: Path) -> onnx.ModelProto:
    """The protobuf message in the file. Raises PackageError when there is none."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        if path.is_dir():
            stranger = recognise(path)
            raise PackageError(f"{path}: {stranger.what}", remedy=stranger.remedy)
        if path.exists() and not path.is_file():
            raise PackageError(f"{path}: not a regular file; name an ONNX file or a package")
        size = path.stat().st_size
        refuse_absent(path)
        if size > PROTOBUF_LIMIT_BYTES:
            raise PackageError(f"{path}: {size:,} bytes; an ONNX file above 2 GiB keeps its weights in external data")
        proto: onnx.ModelProto = onnx.ModelProto.FromString(path.read_bytes())
    except FileNotFoundError as error:
        raise PackageError(f"{path}: no such file; name an ONNX file or a package") from error
    except PermissionError as error:
        raise unreadable(path) from error
    except OSError as error:
        raise PackageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DecodeError as error:
        stranger = recognise(path)
        if stranger.remedy.command and path.suffix != ".onnx":
            raise PackageError(f"{path}: {stranger.what}", remedy=stranger.remedy) from error
        raise PackageError(f"{path}: not an ONNX file, or cut off: it cannot be parsed; {AGAIN}") from error
    if not proto.HasField("graph") or not proto.ir_version or not proto.opset_import:
        raise PackageError(f"{path}: not an ONNX model: it has no graph, no IR version or no operator set; {AGAIN}")
    if not proto.graph.node:
        raise PackageError(f"{path}: its graph has no nodes, so there is nothing to place")
    return proto


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of a stored tensor; 0 for strings and for an attribute that holds none."""
    try:
        return dtypes.size_bytes(dtypes.numbered(tensor.data_type).name, tensor.dims)
    except ValueError:
        return 0


def read_port(port: onnx.ValueInfoProto) -> ModelPort:
    """One graph input."""
    kind = (port.type.WhichOneof("value") or "unknown").removesuffix("_type").replace("_", " ")
    if kind != "tensor":
        return ModelPort(port.name, kind, kind, None)
    tensor = port.type.tensor_type
    dtype = dtypes.numbered(tensor.elem_type).name if tensor.elem_type else "unknown"
    if not tensor.HasField("shape"):
        return ModelPort(port.name, kind, dtype, None)
    return ModelPort(port.name, kind, dtype, tuple(_read_size(size) for size in tensor.shape.dim))


def _read_size(size: onnx.TensorShapeProto.Dimension) -> int | str | None:
    """A size of a shape. Negative ones are how some exporters write that they do not know."""
    if size.HasField("dim_value"):
        return size.dim_value if size.dim_value >= 0 else None
    return size.dim_param or None


def _name_nodes(graph: onnx.GraphProto) -> tuple[int, tuple[str, ...]]:
    """Give every node of the graph and its bodies a name of its own, on one line; how many got one, and what to say."""
    nodes = list(all_nodes(graph))
    named = [[node.name for node in each.node if node.name] for each in all_graphs(graph)]
    refused = any(len(names) > len(set(names)) for names in named)
    broken = 0
    for node in nodes:
        name = CONTROL.sub("_", node.name)
        broken += name != node.name
        node.name = name
    taken = {node.name for node in nodes}
    seen: set[str] = set()
    nameless = repeated = 0
    for position, node in enumerate(nodes):
        if node.name and node.name not in seen:
            seen.add(node.name)
            continue
        nameless += not node.name
        repeated += bool(node.name)
        node.name = _free_name(f"{node.name or node.op_type}_{position}", taken)
        taken.add(node.name)
        seen.add(node.name)
    notes = []
    if nameless:
        notes.append(f"{plural(nameless, 'node')} without a name in the file: called <operator>_<position> here")
    if repeated:
        notes.append(
            f"{plural(repeated, 'node')} with the name of another node: called <name>_<position> here"
            f"{'; ONNX Runtime does not load the file as it is' if refused else ''}"
        )
    if broken:
        notes.append(f"{plural(broken, 'node')} with line breaks or other control characters in the name: here as _")
    return nameless + repeated + broken, tuple(notes)


def _name_in_functions(proto: onnx.ModelProto) -> tuple[int, tuple[str, ...]]:
    """Give every node of the file's functions a name where it has none; how many got one, and what to say.

    ONNX Runtime names the nodes that it puts in the place of a call after those of the function. Without a name they
    are a blank in its log and in its list of nodes.
    """
    named = 0
    for function in proto.functions:
        nodes = list(all_nodes(function))
        taken = {node.name for node in nodes}
        for position, node in enumerate(nodes):
            if not node.name:
                node.name = _free_name(f"{node.op_type}_{position}", taken)
                taken.add(node.name)
                named += 1
    if not named:
        return 0, ()
    return named, (f"{plural(named, 'node')} of functions without a name in the file: <operator>_<position> here",)


def _free_name(wanted: str, taken: Iterable[str]) -> str:
    """`wanted`, or with as many underscores as make it unique."""
    while wanted in taken:
        wanted += "_"
    return wanted


def _structure_notes(proto: onnx.ModelProto) -> tuple[str, ...]:
    """What of the model ONNX Runtime's sources cannot be joined with the file."""
    notes = []
    holders = [node.name for node in proto.graph.node if node.op_type in CONTROL_FLOW]
    if holders:
        inner = sum(1 for _ in all_nodes(proto.graph)) - len(proto.graph.node)
        notes.append(
            f"{plural(inner, 'node')} in control-flow subgraphs count as part of the {plural(len(holders), 'node')} "
            "that contains them: the plan does not list nodes of subgraphs"
        )
    functions = {(function.domain, function.name) for function in proto.functions}
    calls = sum((node.domain, node.op_type) in functions for node in proto.graph.node)
    if calls:
        notes.append(
            f"{plural(calls, 'call')} of functions that the file defines: ONNX Runtime inlines "
            "them, under names of its own, which cannot be matched with the file"
        )
    return tuple(notes)


def fixed_shapes(proto: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Tensors of the main graph whose whole shape follows from the shapes of the inputs, by ONNX's shape inference.

    Where inference fails, only what the file itself declares is known.
    """
    from partita.runtime.tensor_types import is_fixed, tensor_types  # which asks ONNX Runtime; reading a file does not

    types = tensor_types(proto, inputs)
    return frozenset(name for name in defines(proto.graph) if is_fixed(types.get(name)))
