"""Structure of an ONNX file without its weights: nodes, their origin, and external data.

Read before ONNX Runtime opens the file, to reject external data outside the package folder first.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from partita import dtypes
from partita.diagnosis.naming import module_in
from partita.errors import PackageError
from partita.foreign_paths import recognise
from partita.observations.facts import GraphNode
from partita.package.folder import (
    GET_AGAIN,
    MANIFEST,
    SHOWN,
    export_again_remedy,
    path_inside,
    refuse_absent,
    unreadable,
)
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.cpu import Attention, find_attention
from partita.untrusted_files import MOST_BYTES, check_size

if TYPE_CHECKING:
    import onnx
    from google.protobuf.descriptor import Descriptor  # type: ignore[import-untyped]
    from google.protobuf.message import Message  # type: ignore[import-untyped]

PROTOBUF_LIMIT_BYTES = 2**31 - 1
MODULE, SOURCE = "partita.module", "partita.source"
SCOPES = "pkg.torch.onnx.name_scopes"
STACK = "pkg.torch.onnx.stack_trace"
LONGEST_LIST = 1 << 14
"""Maximum characters of a list of scopes or classes."""
DIGITS = re.compile(r"[0-9]{1,19}")
"""An offset or length: a 64-bit number."""
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
HEADS = "num_heads"
"""Attribute of attention operators with heads in the last axis."""
STEP = 8
"""Element multiple of fused attention kernels."""
Tensor = tuple[str, tuple[int, ...]]
"""Element type, and sizes with 0 for a symbolic one."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Structure of one ONNX file."""

    nodes: tuple[GraphNode, ...]
    """Nodes of the main graph, in file order."""
    subgraph_nodes: tuple[GraphNode, ...]
    """Nodes in control-flow subgraphs."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    data_files: frozenset[str]
    """External data files, by the name in the file."""
    attention: Attention | None = None
    """Attention for which the CPU provider has two implementations."""


def read_model_file(path: Path, folder: Path) -> ModelFile:
    """Read the structure of the ONNX file `path`; the weights stay on disk.

    Raises PackageError when the file is damaged, or its external data is outside the package `folder`.
    """
    model = parse_model(path)
    check_external_data(model, path, folder)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    return ModelFile(
        nodes=graph_nodes(model.graph),
        subgraph_nodes=inner_nodes(model.graph),
        inputs=tuple(port.name for port in model.graph.input if port.name not in initializers),
        outputs=tuple(port.name for port in model.graph.output),
        data_files=data_files(model),
        attention=find_attention(model),
    )


def parse_model(path: Path) -> onnx.ModelProto:
    """Read a model without its external data. Raises PackageError when it is missing, damaged or not an ONNX file."""
    try:
        if path.is_dir():
            found = recognise(path)
            raise PackageError(f"{path}: {found.description}", remedy=found.remedy)
        refuse_absent(path)
        return read_light(path)
    except FileNotFoundError as error:
        raise PackageError(f"{path}: no such file; choose an ONNX file or a package") from error
    except PermissionError as error:
        raise unreadable(path) from error
    except OSError as error:
        raise PackageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        found = recognise(path)
        if found.remedy.command and path.suffix != ".onnx":
            raise PackageError(f"{path}: {found.description}", remedy=found.remedy) from error
        remedy = FROM_CHECKPOINT if (path.parent / MANIFEST).is_file() else GET_AGAIN
        raise PackageError(f"{path}: not a readable ONNX file ({error})", remedy=remedy) from error


def read_light(path: Path) -> onnx.ModelProto:
    """Read a model without its external data.

    Raises ValueError if the file is truncated or no ONNX file, OSError if it cannot be read.
    """
    import onnx
    from google.protobuf.message import DecodeError

    check_size(path, MOST_BYTES)
    size = path.stat().st_size
    if size > PROTOBUF_LIMIT_BYTES:
        raise ValueError(f"{size:,} bytes; an ONNX file above 2 GiB must store its weights as external data")
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError("it is truncated, or not a protobuf message") from error
    if not proto.HasField("graph") or not proto.ir_version or not proto.opset_import:
        raise ValueError("it has no graph, no IR version or no operator set")
    if bad := bytes_for_text(proto):
        raise ValueError(f"its {bad} is not UTF-8")
    return proto


def nodes_of(model: bytes) -> tuple[tuple[GraphNode, ...], tuple[GraphNode, ...]]:
    """The nodes of a serialised model, and those in control-flow subgraphs."""
    import onnx

    graph = onnx.load_model_from_string(model).graph
    return graph_nodes(graph), inner_nodes(graph)


def check_external_data(model: onnx.ModelProto, path: Path, folder: Path) -> None:
    """Raise PackageError when external data has an invalid position, is not in `folder`, or is truncated."""
    remedy = export_again_remedy(folder) if (folder / MANIFEST).is_file() else GET_AGAIN
    for location, end in sorted(_data_ends(model, path).items()):
        data = path_inside(folder, location)
        if not data.is_file():
            raise PackageError(f"{path}: its weights file {location[:SHOWN]!r} is missing", remedy=remedy)
        refuse_absent(data)
        size = data.stat().st_size
        if size < end:
            raise PackageError(
                f"{path}: its weights file {location!r} is truncated: it has {size:,} bytes, but the graph reads up to "
                f"byte {end:,}",
                remedy=remedy,
            )


def _data_ends(model: onnx.ModelProto, path: Path) -> dict[str, int]:
    """The end of the last tensor in each external data file. Raises PackageError for an invalid position."""
    ends: dict[str, int] = {}
    for tensor in all_tensors(model):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if not entries and tensor.data_location != tensor.EXTERNAL:
            continue
        numbers = {key: entries.get(key, "0") for key in ("offset", "length")}
        odd = [f"{key} {text[:40]!r}" for key, text in numbers.items() if not DIGITS.fullmatch(text)]
        odd += [] if "location" in entries else ["no location"]
        if odd:
            name = tensor.name[:200]
            raise PackageError(f"{path}: damaged: the external data of tensor {name!r} has {odd[0]}", remedy=GET_AGAIN)
        location = entries["location"]
        end = int(numbers["offset"]) + max(int(numbers["length"]), tensor_bytes(tensor))
        ends[location] = max(ends.get(location, 0), end)
    return ends


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of a stored tensor; 0 for strings and for an attribute without a tensor."""
    name = dtypes.name_of(tensor.data_type)
    return 0 if dtypes.bits_of(name) is None else dtypes.size_bytes(name, tensor.dims)


def data_files(model: onnx.ModelProto) -> frozenset[str]:
    """External data files, by their names in the model."""
    entries = (entry for tensor in all_tensors(model) for entry in tensor.external_data)
    return frozenset(entry.value for entry in entries if entry.key == "location")


def bytes_for_text(message: Message, path: str = "") -> str | None:
    """Path of the first string that is not UTF-8, e.g. graph.node[3].name; None without one.

    It is bytes in Python. ONNX Runtime opens the file, but its Python package fails on the string later.
    """
    for name, is_text, several in _fields(message.DESCRIPTOR):
        if not several and not message.HasField(name):
            continue
        found = getattr(message, name)
        for place, value in enumerate(found if several else (found,)):
            if not is_text:
                inner = bytes_for_text(value, f"{path}{name}{f'[{place}]' if several else ''}.")
                if inner is not None:
                    return inner
            elif isinstance(value, bytes):
                return f"{path}{name}{f'[{place}]' if several else ''}"
    return None


@functools.cache
def _fields(kind: Descriptor) -> tuple[tuple[str, bool, bool], ...]:
    """Fields of a message that contain strings or messages: name, whether a string, whether repeated."""
    fields = [field for field in kind.fields if field.type in (field.TYPE_STRING, field.TYPE_MESSAGE)]
    return tuple((field.name, field.type == field.TYPE_STRING, field.is_repeated) for field in fields)


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in the file: initializers and attributes, including subgraphs and functions."""
    for scope in (scope for root in (model.graph, *model.functions) for scope in all_graphs(root)):
        yield from getattr(scope, "initializer", ())  # a function has none
        for sparse in getattr(scope, "sparse_initializer", ()):
            yield from (sparse.values, sparse.indices)
        for attribute in (attribute for node in scope.node for attribute in node.attribute):
            yield from (attribute.t, *attribute.tensors)


def subgraphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The subgraphs of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Every node of a graph or a function, then those of its subgraphs."""
    for scope in all_graphs(graph):
        yield from scope.node


def all_graphs(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[Any]:
    """A graph or a function, and its subgraphs at any depth."""
    yield graph
    for node in graph.node:
        for body in subgraphs_of(node):
            yield from all_graphs(body)


def tensors_read(node: onnx.NodeProto) -> Iterator[str]:
    """Tensors that a node reads: its inputs, and outer tensors that its subgraphs read."""
    yield from (name for name in node.input if name)
    for body in subgraphs_of(node):
        own = defines(body)
        inside = (name for entry in body.node for name in tensors_read(entry))
        yield from (name for name in (*inside, *(port.name for port in body.output)) if name not in own)


def defines(graph: onnx.GraphProto) -> frozenset[str]:
    """Tensors of a graph: inputs, constants and node outputs, without those of subgraphs."""
    given = (*graph.input, *graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
    return frozenset(entry.name for entry in given).union(*(filter(None, node.output) for node in graph.node))


def inner_nodes(graph: onnx.GraphProto) -> tuple[GraphNode, ...]:
    """Nodes in control-flow subgraphs, at any depth, in the order of `all_nodes`."""
    found: list[GraphNode] = []
    for node in graph.node:
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                found += (replace(graph_node(inner), subgraph_attribute=attribute.name) for inner in body.node)
                found += inner_nodes(body)
    return tuple(found)


def graph_node(node: onnx.NodeProto) -> GraphNode:
    """One node as a fact, named by Partita's metadata, the node name, or torch's metadata, in this order."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    return GraphNode(
        name=node.name,
        op_type=node.op_type,
        domain=node.domain,
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        module=(notes[MODULE] if MODULE in notes else module_in(node.name) or _innermost(notes.get(SCOPES))) or None,
        source=notes.get(SOURCE) or _last_frame(notes.get(STACK)),
    )


def _innermost(listed: str | None) -> str | None:
    """The innermost module in torch's list of scopes, whose last entry is the operator."""
    if not listed:
        return None
    try:
        entries = ast.literal_eval(listed[:LONGEST_LIST])
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two for deep nesting
        return None
    if not isinstance(entries, list) or len(entries) < 2:
        return None
    return str(entries[-2]) or None


def _last_frame(trace: str | None) -> str | None:
    """`file:line` of the innermost frame of a stack trace; the file is relative to its package."""
    frames = list(FRAME.finditer(trace or ""))
    if not frames:
        return None
    parts = PurePath(frames[-1]["file"]).parts
    if "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
    return f"{PurePath(*parts).as_posix()}:{frames[-1]['line']}"


# --- facts of nodes that may select a kernel: attributes, element types, constants, head size -------------------------


def graph_nodes(graph: onnx.GraphProto) -> tuple[GraphNode, ...]:
    """The nodes of a graph, without subgraphs, with their `form`."""
    constants = {tensor.name: (_type(tensor.data_type), tuple(tensor.dims)) for tensor in graph.initializer}
    known = {port.name: _declared_tensor(port) for port in (*graph.value_info, *graph.output, *graph.input)} | constants
    return tuple(replace(graph_node(node), form=tuple(_form(node, known, constants).items())) for node in graph.node)


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
