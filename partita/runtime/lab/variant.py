"""Models of parts of a graph: one node for an experiment, several for a bisection.

Inputs keep type, shape and whether they are constants: small constants keep their values, large ones become zeros,
because no provider's placement depends on them. Names are normalised, so that nodes that differ only in names give the
same model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from partita import dtypes
from partita.runtime.lab.graph import CannotProbeError, Graph, free_names, inner_names, rename
from partita.runtime.lab.schema import Operator, find_operator, plain_domain
from partita.runtime.place.model_file import all_graphs, subgraphs_of, tensors_read
from partita.runtime.place.tensor_types import (
    SMALL_BYTES,
    element_of,
    is_fixed,
    is_small,
    sizes_of,
    tensor_type,
    tensor_types,
)

if TYPE_CHECKING:
    import onnx

NODE = "probe"
"""Name of the node under test."""
AUXILIARY = "auxiliary"
"""Name of the auxiliary Neg, and name prefix of other auxiliary nodes."""
AFTER = f"{AUXILIARY}_after"
"""Name of a second Neg, after the node."""
INSIDE = f"{AUXILIARY}_inside"
"""Name prefix of a Cast after the node."""
DETACHED = "detached"
"""Graph input of a Neg that is not connected to the node."""
SIGNED = frozenset(dtypes.numbers("float32", "int32", "int64", "float16"))
(FLOAT,) = dtypes.numbers("float32")
POINTER_BYTES = 8
ZEROS = "zeros.bin"
"""Sparse file of zeros, the external data of large constants."""
RUN = "partita.run"
"""Metadata key of a changed node: sizes of its inputs by name, in JSON; null if they are unknown or large."""
TIMED = "partita.timed"
"""Metadata key of a model whose run is also timed."""
MOST_RUN = 1 << 24
"""Maximum elements of all inputs and constants of a node that is run."""
USUAL_FLOATS = frozenset(dtypes.numbers("float32", "float16"))


@dataclass(frozen=True, slots=True)
class ExperimentInput:
    """One input of an experiment."""

    name: str
    kind: onnx.TypeProto
    constant: onnx.TensorProto | None = None
    fixed: onnx.TypeProto | None = None
    """The type with the sizes of the run, if known."""
    folded: onnx.TensorProto | None = None
    """Its value if it is constant with these sizes."""
    run_value: onnx.TensorProto | None = None
    """Its value in the run, if known."""

    @property
    def run_kind(self) -> onnx.TypeProto:
        """The type with the sizes of the run if known, else the type in the file."""
        return self.fixed or self.kind

    @property
    def run_sizes(self) -> tuple[int, ...] | None:
        """The sizes in the experiment, else in the run; None if unknown."""
        return sizes_of(self.kind if is_fixed(self.kind) else self.fixed)


@dataclass(frozen=True, slots=True)
class Variant:
    """One node with all data for experiments."""

    node: onnx.NodeProto
    feeds: tuple[ExperimentInput, ...]
    """One for each tensor that the node or its subgraphs read."""
    opsets: Mapping[str, int]
    ir_version: int
    inner_outputs: frozenset[str] = frozenset()
    """Outputs that are not graph outputs, because other nodes read them."""
    output_types: Mapping[str, onnx.TypeProto] = field(default_factory=dict)
    """Outputs with the sizes of the run, if known."""
    declared: Mapping[str, onnx.TypeProto] = field(default_factory=dict)
    """Outputs whose sizes the experiment declares, because they depend on values."""
    internal: frozenset[str] = frozenset()
    """Outputs of `passed_on` of unusual types: some providers reject them as graph outputs only."""

    def feed(self, name: str) -> ExperimentInput | None:
        """The feed of an input; None for an omitted input."""
        return next((feed for feed in self.feeds if feed.name == name), None)

    @property
    def operator(self) -> Operator | None:
        """Its version of the operator; None for an unknown operator."""
        return find_operator(self.node.domain, self.node.op_type, self.opsets.get(self.node.domain, 1))


def node_variant(graph: Graph, name: str) -> Variant:
    """The variant of one node. Raises CannotProbeError when a type is unknown."""
    original = graph.find(name)
    if original is None:
        raise CannotProbeError("it is not in the ONNX file")
    node = deepcopy(original)
    node.name, node.doc_string, node.domain = NODE, "", plain_domain(original.domain)
    del node.metadata_props[:]
    _lighten_subgraphs(node, graph.folder)
    inside = inner_names(original)
    plain = dict(zip(dict.fromkeys(tensors_read(original)), free_names("i", inside), strict=False))
    rename(node, plain)
    outputs = dict(zip(filter(None, original.output), free_names("o", inside), strict=False))
    for position, old in enumerate(original.output):
        node.output[position] = outputs.get(old, "")
    feeds = tuple(_make_feed(graph, old, new) for old, new in plain.items())
    variant = Variant(
        node,
        feeds,
        {plain_domain(entry.domain): entry.version for entry in graph.proto.opset_import},
        graph.proto.ir_version,
        frozenset(new for old, new in outputs.items() if old not in graph.outputs),
        {new: graph.fixed[old] for old, new in outputs.items() if is_fixed(graph.fixed.get(old))},
    )
    elements = {new: element_of(graph.types[old]) for old, new in outputs.items() if old in graph.types}
    odd = {name for name, element in elements.items() if element is not None and element not in USUAL_FLOATS}
    variant = replace(variant, internal=variant.inner_outputs & odd)
    declared = {new: graph.declared[old] for old, new in outputs.items() if old in graph.declared}
    return replace(variant, declared=_not_inferred(variant, declared)) if declared else variant


def _not_inferred(variant: Variant, declared: Mapping[str, onnx.TypeProto]) -> dict[str, onnx.TypeProto]:
    """Outputs whose sizes are in the file but cannot be inferred from the inputs."""
    known = tensor_types(variant_model(variant))
    return {name: kind for name, kind in declared.items() if not is_fixed(known.get(name))}


def _make_feed(graph: Graph, old: str, new: str) -> ExperimentInput:
    """The feed for the tensor `old` of the graph. Raises CannotProbeError."""
    constant, folded, default = (
        _light_constant(known[old], new, graph.folder) if old in known else None
        for known in (graph.constants, graph.folded, graph.input_defaults)
    )
    fixed = graph.fixed[old] if is_fixed(graph.fixed.get(old)) else None
    if constant is not None:
        return ExperimentInput(new, tensor_type(constant.data_type, constant.dims), constant, fixed, folded, default)
    kind = graph.types.get(old) or graph.fixed.get(old)
    if kind is None:
        raise CannotProbeError(f"the type of its input {old!r} is unknown")
    return ExperimentInput(new, kind, None, fixed, folded, default)


def _light_constant(tensor: onnx.TensorProto, name: str, folder: Path) -> onnx.TensorProto:
    """A constant with its values if small, else with zeros."""
    import onnx

    outside = tensor.external_data and size_of(tensor.data_type, tensor.dims) <= SMALL_BYTES
    if not outside and not is_small(tensor):
        return zeros(name, tensor.data_type, tensor.dims)
    light = deepcopy(tensor)
    if outside:
        try:
            onnx.external_data_helper.load_external_data_for_tensor(light, str(folder))
        except (OSError, ValueError, onnx.checker.ValidationError):
            return zeros(name, tensor.data_type, tensor.dims)
        del light.external_data[:]
        light.data_location = onnx.TensorProto.DEFAULT
    light.name, light.doc_string = name, ""
    return light


def _lighten_subgraphs(node: onnx.NodeProto, folder: Path) -> None:
    """Store constants of its subgraphs inside the node, because experiments have no external data of the file."""
    for body in subgraphs_of(node):
        for graph in all_graphs(body):
            for tensor in graph.initializer:
                tensor.CopyFrom(_light_constant(tensor, tensor.name, folder))


def zeros(name: str, element: int, sizes: Sequence[int]) -> onnx.TensorProto:
    """A constant of zeros, in the external file of zeros if large."""
    import onnx

    length = size_of(element, sizes)
    tensor = onnx.TensorProto(name=name, data_type=element, dims=list(sizes))
    if element == onnx.TensorProto.STRING:  # cannot be external data
        tensor.string_data.extend([b""] * math.prod(sizes))
        return tensor
    if length <= SMALL_BYTES:
        tensor.raw_data = bytes(length)
        return tensor
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", ZEROS), ("offset", "0"), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def size_of(element: int, sizes: Sequence[int]) -> int:
    """Bytes of a tensor: types below one byte are packed, and a string counts as its pointer."""
    kind = dtypes.dtype_numbered(element)
    return math.prod(sizes) * POINTER_BYTES if kind.bits is None else dtypes.size_bytes(kind.name, sizes)


def variant_model(variant: Variant, *, auxiliary: bool = False) -> onnx.ModelProto:
    """The model of one experiment. Outputs have declared types only; ONNX Runtime infers the others.

    `auxiliary`: add a Neg, because a compiling provider may not support a partition of a single node, and a Cast after
    each internal output.
    """
    return finish(variant_graph(variant, auxiliary=auxiliary), variant.opsets, variant.ir_version)


def variant_graph(variant: Variant, *, auxiliary: bool = False) -> onnx.GraphProto:
    """The graph of `variant_model`, without opsets and functions."""
    import onnx

    graph = onnx.GraphProto(name=NODE)
    graph.node.add().CopyFrom(variant.node)
    inside = set[str]()
    if auxiliary:
        inside |= _add_auxiliary(graph, variant.feeds, variant)
        for name in sorted(variant.internal.intersection(variant.node.output) - inside):
            after = f"{INSIDE}_{name}"
            graph.node.append(onnx.helper.make_node("Cast", [name], [after], name=after, to=FLOAT))
            graph.output.add(name=after)
            inside.add(name)
    _add_feeds(graph, variant.feeds)
    for name in filter(None, variant.node.output):
        ports = graph.value_info if name in inside else graph.output
        if name not in inside or name in variant.declared:
            ports.add(name=name, type=variant.declared.get(name))
    return graph


def _add_auxiliary(
    graph: onnx.GraphProto, feeds: Sequence[ExperimentInput], variant: Variant | None = None
) -> set[str]:
    """Add a Neg before the only node, or after it if no input is signed (only for a variant).

    Returns outputs of the node that are no longer graph outputs, because some providers treat a node before a graph
    output differently. If the node reads only constants, the Neg is unconnected: a provider may not open a graph
    without inputs.
    """
    import onnx

    (node,) = graph.node
    first = next((feed for feed in feeds if feed.constant is None and is_signed(feed.kind)), None)
    if first is not None and first.name in node.input:
        rename(node, {first.name: AUXILIARY})
        graph.node.insert(0, onnx.helper.make_node("Neg", [first.name], [AUXILIARY], name=AUXILIARY))
        return set()
    fed = any(feed.constant is None for feed in feeds)
    if not fed:
        add_detached(graph)
    types = tensor_types(variant_model(variant)) if variant is not None else {}
    signed = next((name for name in node.output if name in types and is_signed(types[name])), "")
    inner = variant.inner_outputs & {signed} if variant is not None else frozenset()
    if not signed or not (fed or inner):
        return set()
    after = AUXILIARY if fed else AFTER
    graph.node.append(onnx.helper.make_node("Neg", [signed], [after], name=after))
    graph.output.add(name=after)
    return set(inner)


def add_detached(graph: onnx.GraphProto) -> None:
    """Add a float Neg, which most providers support, with its own input and output."""
    import onnx

    output = f"{DETACHED}_{AUXILIARY}"
    graph.node.insert(0, onnx.helper.make_node("Neg", [DETACHED], [output], name=AUXILIARY))
    graph.input.add(name=DETACHED, type=tensor_type(FLOAT, (1,)))
    graph.output.add(name=output)


def is_signed(kind: onnx.TypeProto) -> bool:
    """Whether nearly every provider can negate a tensor of this type."""
    return kind.WhichOneof("value") == "tensor_type" and kind.tensor_type.elem_type in SIGNED


def part_model(
    graph: Graph, names: Sequence[str] = (), *, fixed: bool = True, auxiliary: bool = False
) -> onnx.ModelProto:
    """The model of some nodes, else of all, with the sizes of the run unless `fixed` is False.

    `auxiliary`: see `variant_model`. Raises CannotProbeError when a type is unknown.
    """
    import onnx

    chosen = [graph.nodes[name] for name in names] or list(graph.proto.graph.node)
    own = {node.name for node in chosen}
    made = {output for node in chosen for output in node.output if output}
    part = onnx.GraphProto(name=NODE)
    part.node.extend(chosen)
    for node in part.node:
        _lighten_subgraphs(node, graph.folder)
    needed = dict.fromkeys(name for node in chosen for name in tensors_read(node) if name not in made)
    feeds = [_make_feed(graph, name, name) for name in needed]
    if fixed:
        feeds = [replace(feed, kind=feed.run_kind) if feed.constant is None else feed for feed in feeds]
    if auxiliary and len(chosen) == 1 and any(feed.constant is None for feed in feeds):
        _add_auxiliary(part, feeds)
    _add_feeds(part, feeds)
    outside = {name for node in graph.proto.graph.node if node.name not in own for name in tensors_read(node)}
    outside |= {port.name for port in graph.proto.graph.output}
    read_inside = {name for node in chosen for name in tensors_read(node)}
    for name in sorted(made):
        kind = graph.fixed[name] if fixed and is_fixed(graph.fixed.get(name)) else None
        if name in outside or name not in read_inside:
            port = part.output.add(name=name)
            declared = kind or graph.types.get(name)
            if declared is not None:
                port.type.CopyFrom(declared)
        elif kind is not None:
            part.value_info.add(name=name, type=kind)
    opsets = {entry.domain: entry.version for entry in graph.proto.opset_import}
    return finish(part, opsets, graph.proto.ir_version)


def _add_feeds(graph: onnx.GraphProto, feeds: Sequence[ExperimentInput]) -> None:
    """Add constants as initializers, other feeds as inputs."""
    for feed in feeds:
        if feed.constant is not None:
            graph.initializer.add().CopyFrom(feed.constant)
        else:
            graph.input.add(name=feed.name, type=feed.kind)


def finish(graph: onnx.GraphProto, opsets: Mapping[str, int], ir_version: int) -> onnx.ModelProto:
    """The model that contains a graph."""
    import onnx

    model = onnx.ModelProto(ir_version=ir_version)
    model.graph.CopyFrom(graph)
    for domain, version in sorted(opsets.items()):
        model.opset_import.add(domain=domain, version=version)
    return model


def to_run(model: onnx.ModelProto, variant: Variant, *, timed: bool = False) -> onnx.ModelProto:
    """The model of a variant, marked to be run once it is placed."""
    model.metadata_props.add(key=RUN, value=json.dumps(_sizes_in_run(variant)))
    if timed:
        model.metadata_props.add(key=TIMED, value="1")
    return model


def _sizes_in_run(variant: Variant) -> dict[str, tuple[int, ...]] | None:
    """Sizes of the non-constant inputs in the run, by name; None if unknown or large, or if sizes depend on values."""
    known = {feed.name: sizes for feed in variant.feeds if (sizes := feed.run_sizes) is not None}
    if variant.declared or len(known) < len(variant.feeds) or sum(map(math.prod, known.values())) >= MOST_RUN:
        return None
    return {feed.name: known[feed.name] for feed in variant.feeds if feed.constant is None}


def fingerprint(model: onnx.ModelProto) -> str:
    """A key that is equal for equal models."""
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def zeros_needed(models: Sequence[onnx.ModelProto]) -> int:
    """Length in bytes of the file of zeros that these models read."""
    lengths = [
        int(entry.value)
        for model in models
        for graph in all_graphs(model.graph)
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "length"
    ]
    return max(lengths, default=0)
