"""A model's graph, prepared for extracting nodes: nodes, known types, and constants.

ONNX Runtime folds shape arithmetic (Shape, Gather, Concat before a Reshape) once sizes are fixed, so small tensors that
depend only on the sizes of the inputs count as constants, too.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.inliner

from partita import dtypes
from partita.observations.names import INLINED
from partita.runtime.lab.schema import plain_domain
from partita.runtime.place.model_file import all_graphs, all_nodes, defines, subgraphs_of
from partita.runtime.place.onnx_model import OnnxModel
from partita.runtime.place.tensor_types import is_fixed, is_small, sizes_of, tensor_type, tensor_types

CALLED = re.compile(r"(?P<name>.+)__\d+", re.DOTALL)
"""Name pattern of inlined function nodes in the onnx package."""
TOKEN = re.compile(r"_token_\d+")
"""ONNX Runtime's name suffixes: for nodes of repeated function calls, and for renamed nodes."""


class CannotProbeError(Exception):
    """No model can be made of this node; the message contains the reason."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A model's main graph, ready for extracting parts."""

    proto: onnx.ModelProto
    folder: Path
    """Folder of the external data."""
    nodes: Mapping[str, onnx.NodeProto]
    """Nodes of the main graph, then nodes of subgraphs."""
    constants: Mapping[str, onnx.TensorProto]
    types: Mapping[str, onnx.TypeProto]
    """Types as in the file."""
    fixed: Mapping[str, onnx.TypeProto]
    """Types with the sizes of the run."""
    folded: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    """Tensors that are constant when the sizes are fixed."""
    input_defaults: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    """Default values of inputs."""
    outputs: frozenset[str] = frozenset()
    """Outputs of the graph and of its subgraphs."""
    declared: Mapping[str, onnx.TypeProto] = field(default_factory=dict)
    """Types in the file with only numeric sizes."""
    function_of: Mapping[str, str] = field(default_factory=dict)
    """The inlined function node by ONNX Runtime's name, matched by its call and by a run's output types."""
    calling_nodes: Mapping[str, str] = field(default_factory=dict)
    """The node of the file's main graph that calls an inlined function node, also through other functions."""

    def find(self, name: str) -> onnx.NodeProto | None:
        """The node `name`, which may be ONNX Runtime's name of an inlined function node."""
        own = self.function_of.get(name, name)
        if own not in self.nodes:  # not in the run's facts
            own = self._functions_of({name: ()}, {}, {}).get(name, name)
        return self.nodes.get(own)

    def fits(self, node: onnx.NodeProto, made: Sequence[str]) -> bool:
        """Whether a node's output types match the run, as far as both are known."""
        outputs = [name for name in node.output if name]
        if made and len(outputs) != len(made):
            return False
        pairs = ((self.fixed.get(name), read_type(text)) for name, text in zip(outputs, made, strict=False))
        return all(
            kind.tensor_type.elem_type == seen.tensor_type.elem_type and sizes_of(kind) in (None, sizes_of(seen))
            for kind, seen in pairs
            if kind is not None and seen is not None
        )

    def with_observed_types(
        self,
        outputs: Mapping[str, Sequence[str]],
        callers: Mapping[str, Sequence[str]],
        operators: Mapping[str, str | None] = MappingProxyType({}),
    ) -> Graph:
        """The graph with output types observed in a run, by node; their sizes are sizes of the run.

        `callers`: file nodes that may call an inlined function node, by ONNX Runtime's name for it. `operators`: those
        of the run's nodes.
        """
        inlined = self._functions_of(outputs, callers, operators)
        seen: dict[str, onnx.TypeProto] = {}
        for name, texts in outputs.items():
            node = self.nodes.get(inlined.get(name, name))
            made = [output for output in node.output if output] if node is not None else []
            if len(made) == len(texts):
                kinds = zip(made, map(read_type, texts), strict=True)
                seen |= {output: kind for output, kind in kinds if kind is not None}
        sizes = {name: kind for name, kind in seen.items() if not is_fixed(self.fixed.get(name))}
        return replace(self, types={**seen, **self.types}, fixed={**self.fixed, **sizes}, function_of=inlined)

    def _functions_of(
        self,
        outputs: Mapping[str, Sequence[str]],
        callers: Mapping[str, Sequence[str]],
        operators: Mapping[str, str | None],
    ) -> dict[str, str]:
        """The inlined function nodes by ONNX Runtime's name.

        Operators, callers and output types distinguish calls of a function, and functions of the same name.
        """
        calls: dict[str, list[str]] = {}
        for own in self.nodes:
            calls.setdefault(called_name(own), []).append(own)
        found: dict[str, str] = {}
        for name in {**outputs, **callers}:
            if not name.startswith(INLINED) or name in self.nodes:
                continue
            plain = TOKEN.sub("", name)
            if plain not in calls:  # renamed by ONNX Runtime with a suffix
                plain = max((each for each in calls if each and plain.startswith(f"{each}_")), key=len, default="")
            owners, made = callers.get(name, ()), outputs.get(name, ())
            alike = calls[plain] if plain else ()
            ranks = {
                own: (node.op_type == operators.get(name), self.calling_nodes.get(own) in owners, self.fits(node, made))
                for own in alike
                for node in (self.nodes[own],)
            }
            if ranks:
                found[name] = max(ranks, key=lambda own: ranks[own])
        return found


def called_name(own: str) -> str:
    """ONNX Runtime's name of an inlined function node, without the suffix of its call; empty for other nodes."""
    match = CALLED.fullmatch(own) if own.startswith(INLINED) else None
    return TOKEN.sub("", match["name"]) if match is not None else ""


def cut_graph(model: OnnxModel, sizes: Mapping[str, tuple[int, ...]]) -> Graph:
    """Prepare a model for extracting nodes. `sizes`: shapes of its inputs in the run."""
    return cut_proto(model.proto, model.data_folder or model.path.parent, sizes)


def cut_proto(proto: onnx.ModelProto, folder: Path, sizes: Mapping[str, tuple[int, ...]]) -> Graph:
    """Prepare a model without a file. `folder`: folder of the external data."""
    unfolded = _inline_functions(proto)
    calls = _calling_nodes(proto, unfolded)
    proto, defaults = without_defaults(with_unique_names(unfolded))
    fixed = tensor_types(proto, sizes, by_runtime=True)
    ports = (*proto.graph.value_info, *proto.graph.output)
    types = tensor_types(proto, by_runtime=True)
    # ONNX Runtime folds known values, too.
    constants = {**known_values(proto, types, shapes=False), **find_constants(proto)}
    return Graph(
        proto=proto,
        folder=folder,
        nodes={node.name: node for node in all_nodes(proto.graph)},
        constants=constants,
        types=types,
        fixed=fixed,
        folded=known_values(proto, fixed),
        input_defaults=defaults,
        declared={port.name: port.type for port in ports if is_fixed(port.type)},
        outputs=frozenset(port.name for graph in all_graphs(proto.graph) for port in graph.output),
        calling_nodes=calls,
    )


def _calling_nodes(proto: onnx.ModelProto, unfolded: onnx.ModelProto) -> dict[str, str]:
    """The node of the main graph that calls an inlined function node: all between the tensors of the call are its."""
    makers = {output: node for node in unfolded.graph.node for output in node.output if output}
    functions = {(function.domain, function.name) for function in proto.functions}
    found: dict[str, str] = {}
    for call in proto.graph.node:
        if (call.domain, call.op_type) in functions:
            outside, open_tensors = set(call.input), list(call.output)
            while open_tensors:
                node = makers.get(open_tensors.pop())
                if node is not None and node.name not in found:
                    found[node.name] = call.name
                    open_tensors += (name for name in node.input if name not in outside)
    return found


def read_type(text: str) -> onnx.TypeProto | None:
    """The type written as float32[1,12]; None if invalid."""
    name, _, rest = text.partition("[")
    element = dtypes.find(name)
    sizes = [part for part in rest.rstrip("]").split(",") if part]
    if element is None or not all(part.isdecimal() for part in sizes):
        return None
    return tensor_type(element.number, [int(part) for part in sizes])


def _inline_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its functions inlined, as ONNX Runtime does it.

    ONNX Runtime uses the model's operator set versions for a function's nodes (1.31.1: Selu of a function with opset
    21, in a model of 22, is Selu-22). It names them after their function, so nodes of two functions may have the same
    name.
    """
    if not proto.functions:
        return proto
    versions = {plain_domain(entry.domain): entry.version for entry in proto.opset_import}
    restamped = deepcopy(proto)
    for function in restamped.functions:
        for entry in function.opset_import:
            entry.version = versions.get(plain_domain(entry.domain), entry.version)
        for node in all_nodes(function):
            node.name = f"{INLINED}{function.name}_{node.name}"
    try:
        made: onnx.ModelProto = onnx.inliner.inline_local_functions(restamped)
    except Exception:  # noqa: BLE001 - native code; only function nodes become untestable
        return restamped
    return made


# --- names of tensors ----------------------------------------------------------------------------------------------


def rename(node: onnx.NodeProto, names: Mapping[str, str], numbers: Iterator[int] | None = None) -> None:
    """Rename the tensors that a node reads, also in its subgraphs, except tensors that a subgraph defines.

    `numbers`: each subgraph takes one as the suffix of the names that it defines.
    """
    node.input[:] = [names.get(name, name) for name in node.input]
    for body in subgraphs_of(node):
        suffix = "" if numbers is None else f"@{next(numbers)}"
        visible = {**names, **{name: f"{name}{suffix}" for name in defines(body)}}
        tensors = (*body.initializer, *(sparse.values for sparse in body.sparse_initializer))
        for entry in (*body.input, *body.output, *body.value_info, *tensors):
            entry.name = visible.get(entry.name, entry.name)
        for inner in body.node:
            rename(inner, visible, numbers)
            inner.output[:] = [visible.get(name, name) for name in inner.output]


def with_unique_names(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a unique name for each subgraph tensor; the same object if it has no subgraphs."""
    if not any(True for node in proto.graph.node for _ in subgraphs_of(node)):
        return proto
    numbers, renamed = itertools.count(), deepcopy(proto)
    for node in renamed.graph.node:
        rename(node, {}, numbers)
    return renamed


def inner_names(node: onnx.NodeProto) -> frozenset[str]:
    """Names of tensors defined in the subgraphs of a node, at any depth."""
    return frozenset[str]().union(*(defines(graph) for body in subgraphs_of(node) for graph in all_graphs(body)))


def free_names(prefix: str, taken: Collection[str]) -> Iterator[str]:
    """`i0`, `i1`, … without taken names."""
    return (name for number in itertools.count() if (name := f"{prefix}{number}") not in taken)


# --- constants and known values --------------------------------------------------------------------------------------

MOST_ELEMENTS = 256
"""Maximum elements of a stored value."""
MOST_MADE = 1 << 22
"""Maximum elements computed during evaluation."""
SIZED_BY_VALUES = frozenset({"Expand", "Tile"})
"""Operators whose output size depends on values."""
SHAPE_ARITHMETIC = """
Abs Add Cast Ceil Concat Div Equal Expand Floor Gather GatherElements GatherND Greater GreaterOrEqual Identity Less
LessOrEqual Max Min Mod Mul Neg Not ReduceMax ReduceMin ReduceProd ReduceSum Reshape ScatterElements Shape Size
Slice Split Squeeze Sub Tile Unsqueeze Where
"""
FOLDED = frozenset(SHAPE_ARITHMETIC.split())
CONSTANT_TYPES = {"value_float": "float32", "value_int": "int64", "value_string": "object"}
"""Attributes of Constant for one value or, with an s at the end, a list."""
OVERRIDABLE_SINCE = 4
"""IR version since which an initializer that is also a graph input is that input's default; before, every initializer
had to be an input (onnx/docs/IR.md, and Graph::CanOverrideInitializer in onnxruntime/core/graph/graph.h)."""


def find_constants(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Constants by name: dense and sparse initializers, and outputs of Constant nodes."""
    found: dict[str, onnx.TensorProto] = {}
    for graph in all_graphs(proto.graph):
        found |= {tensor.name: tensor for tensor in graph.initializer}
        found |= {sparse.values.name: _dense_zeros(sparse) for sparse in graph.sparse_initializer}
        found |= {node.output[0]: value for node in graph.node if (value := constant_of(node)) is not None}
    return found


def without_defaults(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """The model without initializers that are also graph inputs, and these initializers."""
    inputs = {port.name for port in proto.graph.input}
    defaults = {tensor.name: tensor for tensor in proto.graph.initializer if tensor.name in inputs}
    if proto.ir_version < OVERRIDABLE_SINCE or not defaults:
        return proto, {}
    bare = deepcopy(proto)
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(tensor for tensor in proto.graph.initializer if tensor.name not in defaults)
    return bare, defaults


def constant_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The tensor of a Constant node; None for other nodes, and for non-tensor values."""
    if node.op_type != "Constant" or node.domain or not node.output or not node.attribute:
        return None
    (attribute,) = node.attribute[:1]
    if attribute.name == "value":
        tensor: onnx.TensorProto = attribute.t
        return tensor
    if attribute.name == "sparse_value":
        return _dense_zeros(attribute.sparse_tensor)
    dtype = CONSTANT_TYPES.get(attribute.name.removesuffix("s"))
    value = onnx.helper.get_attribute_value(attribute)
    return None if dtype is None else onnx.numpy_helper.from_array(np.array(value, dtype), node.output[0])


def _dense_zeros(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """A sparse constant as dense zeros; no provider's placement depends on values."""
    width = onnx.helper.tensor_dtype_to_np_dtype(sparse.values.data_type).itemsize
    return onnx.TensorProto(
        name=sparse.values.name,
        data_type=sparse.values.data_type,
        dims=list(sparse.dims),
        raw_data=bytes(width * math.prod(sparse.dims)),
    )


def known_values(
    proto: onnx.ModelProto, kinds: Mapping[str, onnx.TypeProto], *, shapes: bool = True
) -> dict[str, onnx.TensorProto]:
    """Small tensors of the main graph that depend only on constants and sizes, without the file's constants.

    `kinds`: types of tensors; sizes that they lack are unknown. `shapes`: whether values may depend on sizes.
    """
    given = {tensor.name: value for tensor in proto.graph.initializer if (value := _small_array(tensor)) is not None}
    values: dict[str, Any] = dict(given)
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    for node in proto.graph.node:
        if not node.domain:
            values.update(zip(node.output, _evaluate(node, opsets, values, kinds, shapes), strict=False))
    kept = {name: value for name, value in values.items() if name and name not in given}
    return {name: onnx.numpy_helper.from_array(value, name) for name, value in kept.items()}


def _small_array(tensor: onnx.TensorProto) -> Any:
    """The values of a small constant; None for strings and large constants."""
    known = is_small(tensor) and tensor.data_type != onnx.TensorProto.STRING
    return onnx.numpy_helper.to_array(tensor) if known else None


def _evaluate(
    node: onnx.NodeProto,
    opsets: Mapping[str, int],
    values: Mapping[str, Any],
    kinds: Mapping[str, onnx.TypeProto],
    shapes: bool,
) -> tuple[Any, ...]:
    """The outputs of a node if known, else empty."""
    from onnx.reference import ReferenceEvaluator  # takes long to import

    if (constant := constant_of(node)) is not None:
        value = _small_array(constant)
        return () if value is None else (value,)
    known = {name: values[name] for name in node.input if name in values}
    try:
        sizes = sizes_of(kinds.get(node.input[0])) if shapes and node.op_type in ("Shape", "Size") else None
        if sizes is not None:
            known[node.input[0]] = np.broadcast_to(np.float32(0), sizes)
        elif not _is_small_result(node, [*known.values()], kinds):
            return ()
        if node.op_type not in FOLDED or any(name and name not in known for name in node.input):
            return ()
        made = ReferenceEvaluator(node, opsets=dict(opsets)).run(None, known)
    except Exception:  # noqa: BLE001 - the evaluator may raise any exception; an unknown value costs an experiment
        return ()
    return tuple(np.asarray(value) for value in made) if all(np.size(value) <= MOST_ELEMENTS for value in made) else ()


def _is_small_result(node: onnx.NodeProto, inputs: Sequence[Any], kinds: Mapping[str, onnx.TypeProto]) -> bool:
    """Whether a node's outputs are small: a mask of 32,768 by 32,768 takes 8 GiB."""
    sizes = [sizes_of(kinds.get(name)) for name in node.output if name]
    if None not in sizes:
        return all(math.prod(each or ()) <= MOST_ELEMENTS for each in sizes)
    return node.op_type not in SIZED_BY_VALUES and math.prod(value.size for value in inputs) <= MOST_MADE
