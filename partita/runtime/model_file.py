"""What an ONNX file says about itself, read without its weights: nodes, their origin, and where the weights lie.

Runs before ONNX Runtime sees the file, so that a path out of the package folder is refused first. Knows nothing of
sessions.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from partita import dtypes
from partita.diagnosis.naming import module_in
from partita.errors import PackageError
from partita.observations.facts import GraphNode
from partita.package import GET_AGAIN, MANIFEST, SHOWN, again, inside, refuse_absent
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.cpu.attention import Attention, find_attention

if TYPE_CHECKING:
    import onnx
    from google.protobuf.descriptor import Descriptor  # type: ignore[import-untyped]
    from google.protobuf.message import Message  # type: ignore[import-untyped]

MODULE, CLASS, SOURCE = "partita.module", "partita.class", "partita.source"
SCOPES, CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"
STACK = "pkg.torch.onnx.stack_trace"
LONGEST_LIST = 1 << 14
"""Characters of a list of scopes or classes."""
DIGITS = re.compile(r"[0-9]{1,19}")
"""A place in a file: a number of 64 bits."""
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Structure of one ONNX file."""

    nodes: tuple[GraphNode, ...]
    """Nodes of the main graph, in file order."""
    inner: tuple[GraphNode, ...]
    """Nodes in the bodies of control flow."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    data_files: frozenset[str]
    """Files that hold tensors outside of it, by the name it uses."""
    attention: Attention | None = None
    """Attention for which the CPU provider has two paths."""


def read_model_file(path: Path, folder: Path) -> ModelFile:
    """Read the structure of the ONNX file `path`; the weights stay on disk.

    Raises PackageError when the file is damaged, or names weights that lie outside the package `folder`.
    """
    import onnx
    from google.protobuf.message import DecodeError

    refuse_absent(path)
    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError, OSError) as error:
        raise PackageError(f"{path}: not a readable ONNX file ({error})", remedy=FROM_CHECKPOINT) from error
    if bad := bytes_for_text(model):
        raise PackageError(f"{path}: damaged: its {bad} is not UTF-8", remedy=FROM_CHECKPOINT)
    check_external_data(model, path, folder)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    return ModelFile(
        nodes=_graph_nodes(model.graph),
        inner=inner_nodes(model.graph),
        inputs=tuple(port.name for port in model.graph.input if port.name not in initializers),
        outputs=tuple(port.name for port in model.graph.output),
        data_files=data_files(model),
        attention=find_attention(model),
    )


def nodes_of(model: bytes) -> tuple[tuple[GraphNode, ...], tuple[GraphNode, ...]]:
    """The nodes of a serialised model as facts, and those in bodies of control flow."""
    import onnx

    graph = onnx.load_model_from_string(model).graph
    return _graph_nodes(graph), inner_nodes(graph)


def _graph_nodes(graph: onnx.GraphProto) -> tuple[GraphNode, ...]:
    """The nodes of a graph as facts; not those in bodies."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    return tuple(replace(graph_node(node), matrix=_matrix(node, constants)) for node in graph.node)


def _matrix(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> str:
    """Element type of the largest constant of two dimensions or more that a node reads; empty for none."""
    read = [constants[name] for name in node.input if name in constants]
    matrices = [tensor for tensor in read if len(tensor.dims) > 1]
    largest = max(matrices, key=lambda tensor: math.prod(tensor.dims), default=None)
    return "" if largest is None else dtypes.name_of(largest.data_type)


def check_external_data(model: onnx.ModelProto, path: Path, folder: Path) -> None:
    """Raise PackageError when a tensor's external data is not in `folder`, or its file ends before it.

    ONNX takes a location as relative to the ONNX file; both lie flat in the package.
    """
    check_places(model, path)
    remedy = again(folder) if (folder / MANIFEST).is_file() else GET_AGAIN
    for location in sorted(data_files(model)):
        data = inside(folder, location)
        if not data.is_file():
            raise PackageError(f"{path}: its weights file {location[:SHOWN]!r} is missing", remedy=remedy)
        refuse_absent(data)
    for location, end in _data_ends(model).items():
        size = inside(folder, location).stat().st_size
        if size < end:
            raise PackageError(
                f"{path}: its weights file {location!r} is cut off: it has {size:,} bytes, and the graph reads up to "
                f"byte {end:,}",
                remedy=remedy,
            )


def check_places(model: onnx.ModelProto, path: Path) -> None:
    """Raise PackageError when a tensor's external data has no file, or begins or ends where no byte can be."""
    for tensor in all_tensors(model):
        said = {entry.key: entry.value for entry in tensor.external_data}
        if not said and tensor.data_location != tensor.EXTERNAL:
            continue
        odd = [f"{key} {said[key][:40]!r}" for key in ("offset", "length") if not DIGITS.fullmatch(said.get(key, "0"))]
        odd += [] if "location" in said else ["no location"]
        if odd:
            name = tensor.name[:200]
            raise PackageError(f"{path}: damaged: the external data of tensor {name!r} has {odd[0]}", remedy=GET_AGAIN)


def _data_ends(model: onnx.ModelProto) -> dict[str, int]:
    """Behind which byte of each file the last tensor ends; sizes that are no numbers count as none."""
    ends: dict[str, int] = {}
    for tensor in all_tensors(model):
        said = {entry.key: entry.value for entry in tensor.external_data}
        if "location" in said:
            offset, length = (
                int(text) if text.isdecimal() else 0 for text in (said.get("offset", ""), said.get("length", ""))
            )
            ends[said["location"]] = max(ends.get(said["location"], 0), offset + length)
    return ends


def data_files(model: onnx.ModelProto) -> frozenset[str]:
    """Files that hold tensors outside of the model, by the name it uses."""
    entries = (entry for tensor in all_tensors(model) for entry in tensor.external_data)
    return frozenset(entry.value for entry in entries if entry.key == "location")


def bytes_for_text(message: Message, path: str = "") -> str | None:
    """Where the first text is that is not UTF-8, as graph.node[3].name; None where there is none.

    Such a text is bytes in Python. ONNX Runtime takes the file, and its Python package fails on what it says about it.
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
    """Fields of a message that hold texts or messages: their names, whether text, whether several."""
    wanted = [field for field in kind.fields if field.type in (field.TYPE_STRING, field.TYPE_MESSAGE)]
    return tuple((field.name, field.type == field.TYPE_STRING, field.is_repeated) for field in wanted)


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in the file: initializers and attributes, in subgraphs and functions too."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _node_tensors(node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        yield from (attribute.t, *attribute.tensors)
    for body in bodies(node):
        yield from _graph_tensors(body)


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Every node of a graph or a function, then those of the bodies in it; the main graph comes first as a whole."""
    yield from graph.node
    for node in graph.node:
        for body in bodies(node):
            yield from all_nodes(body)


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the bodies in it, however deep."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from all_graphs(body)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Tensors that a node reads: its inputs, and what its bodies take from around them."""
    yield from (name for name in node.input if name)
    for body in bodies(node):
        own = defines(body)
        inside = (name for entry in body.node for name in reads(entry))
        yield from (name for name in (*inside, *(port.name for port in body.output)) if name not in own)


def defines(graph: onnx.GraphProto) -> frozenset[str]:
    """Tensors that a graph has itself: inputs, constants, and what its nodes make; not those of bodies in it."""
    given = (*graph.input, *graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
    return frozenset(entry.name for entry in given).union(*(filter(None, node.output) for node in graph.node))


def inner_nodes(graph: onnx.GraphProto) -> tuple[GraphNode, ...]:
    """Nodes in the bodies of control flow, however deep."""
    return tuple(replace(graph_node(node), body=body) for body, node in _in_bodies(graph))


def _in_bodies(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.NodeProto]]:
    """Nodes in bodies in the order of `all_nodes`, each with the attribute that its body is."""
    for node in graph.node:
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from ((attribute.name, inner) for inner in body.node)
                yield from _in_bodies(body)


def graph_node(node: onnx.NodeProto) -> GraphNode:
    """One node as a fact. The exporter's own metadata wins over what torch left; the node name is the last resort."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    return GraphNode(
        name=node.name,
        op_type=node.op_type,
        domain=node.domain,
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        module=(notes[MODULE] if MODULE in notes else module_in(node.name) or _innermost(notes.get(SCOPES))) or None,
        module_class=notes.get(CLASS) or _innermost(notes.get(CLASSES)),
        source=notes.get(SOURCE) or _last_frame(notes.get(STACK)),
    )


def _innermost(listed: str | None) -> str | None:
    """The innermost module in torch's list of scopes or classes; the last entry of a list is the operator itself."""
    if not listed:
        return None
    try:
        entries = ast.literal_eval(listed[:LONGEST_LIST])
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two of expressions that are nested deeply
        return None
    if not isinstance(entries, list) or len(entries) < 2:
        return None
    return str(entries[-2]) or None


def _last_frame(trace: str | None) -> str | None:
    """`file:line` of the innermost frame of a stack trace, the file without the folders above its package."""
    frames = list(FRAME.finditer(trace or ""))
    if not frames:
        return None
    parts = PurePath(frames[-1]["file"]).parts
    if "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
    return f"{PurePath(*parts).as_posix()}:{frames[-1]['line']}"
