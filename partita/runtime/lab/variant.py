"""Models of parts of a graph: one node for an experiment, several for a bisection.

Inputs keep type, shape and whether they are constants: small constants keep their values, large ones become zeros,
because no provider's placement depends on them. Names are normalised, so that nodes that differ only in names give the
same model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner

from partita import dtypes
from partita.runtime.lab.graph import CannotProbeError, Graph, cut_proto, free_names, inner_names, rename
from partita.runtime.lab.placement import AUXILIARY, NODE, RUN, TIMED, ZEROS
from partita.runtime.lab.schema import Operator, find_operator, plain_domain
from partita.runtime.place.model_file import all_graphs, all_nodes, subgraphs_of, tensors_read
from partita.runtime.place.tensor_types import (
    SMALL_BYTES,
    element_of,
    is_fixed,
    is_small,
    sizes_of,
    tensor_type,
    tensor_types,
)

AFTER = f"{AUXILIARY}_after"
"""Name of a second Neg, after the node."""
INSIDE = f"{AUXILIARY}_inside"
"""Name prefix of a Cast after the node."""
DETACHED = "detached"
"""Graph input of a Neg that is not connected to the node."""
SIGNED = frozenset(dtypes.numbers("float32", "int32", "int64", "float16"))
(FLOAT,) = dtypes.numbers("float32")
POINTER_BYTES = 8
MOST_RUN = 1 << 24
"""Maximum elements of all inputs of a node that is run, without constants."""
VALUE_BYTES = 1024
"""Maximum bytes of a constant whose values may decide about the placement, e.g. axes or pads."""
USUAL_OUTPUTS = frozenset({None, *dtypes.numbers("float32", "float16")})
"""Element types with which an output may be a graph output for every provider; None: no tensor."""


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
    """Inner outputs of unusual types: some providers reject them as graph outputs only."""

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
    inputs = dict(zip(dict.fromkeys(tensors_read(original)), free_names("i", inside), strict=False))
    rename(node, inputs)
    outputs = dict(zip(filter(None, original.output), free_names("o", inside), strict=False))
    node.output[:] = [outputs.get(old, "") for old in original.output]
    inner = frozenset(new for old, new in outputs.items() if old not in graph.outputs)
    elements = {new: element_of(graph.types[old]) for old, new in outputs.items() if old in graph.types}
    variant = Variant(
        node,
        tuple(_make_feed(graph, old, new) for old, new in inputs.items()),
        {plain_domain(entry.domain): entry.version for entry in graph.proto.opset_import},
        graph.proto.ir_version,
        inner,
        {new: graph.fixed[old] for old, new in outputs.items() if is_fixed(graph.fixed.get(old))},
        internal=inner & {new for new, element in elements.items() if element not in USUAL_OUTPUTS},
    )
    declared = {new: graph.declared[old] for old, new in outputs.items() if old in graph.declared}
    known = tensor_types(variant_model(variant)) if declared else {}
    return replace(variant, declared={new: kind for new, kind in declared.items() if not is_fixed(known.get(new))})


def _make_feed(graph: Graph, old: str, new: str) -> ExperimentInput:
    """The feed for the tensor `old` of the graph. Raises CannotProbeError."""
    constant, folded, default = (
        _light_constant(known[old], new, graph.folder) if old in known else None
        for known in (graph.constants, graph.folded, graph.input_defaults)
    )
    kind = graph.types.get(old) or graph.fixed.get(old)
    kind = kind if constant is None else tensor_type(constant.data_type, constant.dims)
    if kind is None:
        raise CannotProbeError(f"the type of its input {old!r} is unknown")
    fixed = graph.fixed[old] if is_fixed(graph.fixed.get(old)) else None
    return ExperimentInput(new, kind, constant, fixed, folded, default)


def _light_constant(tensor: onnx.TensorProto, name: str, folder: Path) -> onnx.TensorProto:
    """A constant with its values if small, else with zeros."""
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
    length = size_of(element, sizes)
    tensor = onnx.TensorProto(name=name, data_type=element, dims=list(sizes))
    if element == onnx.TensorProto.STRING:  # cannot be external data
        tensor.string_data.extend([b""] * math.prod(sizes))
    elif length <= SMALL_BYTES:
        tensor.raw_data = bytes(length)
    else:
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
    graph = onnx.GraphProto(name=NODE, node=[variant.node])
    inside = _add_auxiliary(graph, variant.feeds, variant) if auxiliary else set()
    for name in sorted(variant.internal.intersection(variant.node.output) - inside) if auxiliary else ():
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
    inner = {signed} if variant is not None and signed in variant.inner_outputs else set()
    if not signed or not (fed or inner):
        return set()
    after = AUXILIARY if fed else AFTER
    graph.node.append(onnx.helper.make_node("Neg", [signed], [after], name=after))
    graph.output.add(name=after)
    return inner


def add_detached(graph: onnx.GraphProto) -> None:
    """Add a float Neg, which most providers support, with its own input and output."""
    output = f"{DETACHED}_{AUXILIARY}"
    graph.node.insert(0, onnx.helper.make_node("Neg", [DETACHED], [output], name=AUXILIARY))
    graph.input.add(name=DETACHED, type=tensor_type(FLOAT, (1,)))
    graph.output.add(name=output)


def is_signed(kind: onnx.TypeProto) -> bool:
    """Whether nearly every provider can negate a tensor of this type."""
    return element_of(kind) in SIGNED


def part_model(
    graph: Graph, names: Sequence[str] = (), *, fixed: bool = True, auxiliary: bool = False
) -> onnx.ModelProto:
    """The model of some nodes, else of all, with the sizes of the run unless `fixed` is False.

    `auxiliary`: see `variant_model`. Raises CannotProbeError when a type is unknown.
    """
    chosen = [graph.nodes[name] for name in names] or list(graph.proto.graph.node)
    own = {node.name for node in chosen}
    made = {output for node in chosen for output in node.output if output}
    inside = [name for node in chosen for name in tensors_read(node)]
    outside = {name for node in graph.proto.graph.node if node.name not in own for name in tensors_read(node)}
    outside |= {port.name for port in graph.proto.graph.output} | made.difference(inside)
    feeds = [_make_feed(graph, name, name) for name in dict.fromkeys(inside) if name not in made]
    if fixed:
        feeds = [feed if feed.constant is not None else replace(feed, kind=feed.run_kind) for feed in feeds]
    part = onnx.GraphProto(name=NODE, node=chosen)
    for node in part.node:
        _lighten_subgraphs(node, graph.folder)
    if auxiliary and len(chosen) == 1 and any(feed.constant is None for feed in feeds):
        _add_auxiliary(part, feeds)
    _add_feeds(part, feeds)
    for name in sorted(made):
        kind = graph.fixed[name] if fixed and is_fixed(graph.fixed.get(name)) else None
        if name in outside:
            part.output.add(name=name, type=kind or graph.types.get(name))
        elif kind is not None:
            part.value_info.add(name=name, type=kind)
    return finish(part, {entry.domain: entry.version for entry in graph.proto.opset_import}, graph.proto.ir_version)


def _add_feeds(graph: onnx.GraphProto, feeds: Sequence[ExperimentInput]) -> None:
    """Add constants as initializers, other feeds as inputs."""
    for feed in feeds:
        if feed.constant is not None:
            graph.initializer.append(feed.constant)
        else:
            graph.input.add(name=feed.name, type=feed.kind)


def finish(graph: onnx.GraphProto, opsets: Mapping[str, int], ir_version: int) -> onnx.ModelProto:
    """The model that contains a graph."""
    imports = [onnx.helper.make_opsetid(*entry) for entry in sorted(opsets.items())]
    model: onnx.ModelProto = onnx.helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
    return model


def to_run(model: onnx.ModelProto, variant: Variant, *, timed: bool = False) -> onnx.ModelProto:
    """The model of a variant, marked to be run once it is placed, unless its inputs are unknown or large."""
    model.metadata_props.add(key=RUN, value=json.dumps(_sizes_in_run(variant)))
    if timed:
        model.metadata_props.add(key=TIMED, value="1")
    return model


def _sizes_in_run(variant: Variant) -> dict[str, tuple[int, ...]] | None:
    """Sizes of the non-constant inputs in the run, by name; None if unknown or large, or if sizes depend on values."""
    fed = [feed for feed in variant.feeds if feed.constant is None]
    known = {feed.name: sizes for feed in fed if (sizes := feed.run_sizes) is not None}
    is_runnable = len(known) == len(fed) and sum(map(math.prod, known.values())) < MOST_RUN
    return known if is_runnable and not variant.declared else None


def without_values(variant: Variant) -> Variant:
    """The variant with zeros as constants of more than 1 KiB, equal for nodes that differ only in their weights."""

    def emptied(feed: ExperimentInput) -> ExperimentInput:
        known = feed.constant
        if known is None or size_of(known.data_type, known.dims) <= VALUE_BYTES:
            return feed
        return replace(feed, constant=zeros(feed.name, known.data_type, known.dims))

    return replace(variant, feeds=tuple(map(emptied, variant.feeds)))


def fingerprint(model: onnx.ModelProto) -> str:
    """A key that is equal for equal models."""
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def zeros_needed(model: onnx.ModelProto) -> int:
    """Length in bytes of the file of zeros that a model reads."""
    tensors = (tensor for graph in all_graphs(model.graph) for tensor in graph.initializer)
    entries = (entry for tensor in tensors for entry in tensor.external_data if entry.key == "length")
    return max((int(entry.value) for entry in entries), default=0)


# --- nodes of functions of operators ---------------------------------------------------------------------------------

NO_FUNCTION = "ONNX Runtime gave it no name, and none of the file's functions contains it"
FindVariant = Callable[[Sequence[str], str | None, Sequence[str]], Variant]


def function_variants(graph: Graph) -> FindVariant:
    """A function that returns the variant of a node in the function of one of the nodes `owners`.

    ONNX Runtime runs nodes of such functions without a name where no provider supports the operator. `made`: types of
    the node's outputs in the run, e.g. float32[1,12]; nodes with equal types are interchangeable. It raises
    CannotProbeError.
    """
    expanded = cache(partial(_unfold, graph))

    def find(owners: Sequence[str], op_type: str | None, made: Sequence[str]) -> Variant:
        for deep in (False, True):  # nested functions are expanded only where ONNX Runtime must, too
            for body in filter(None, (expanded(owner, deep) for owner in owners)):
                for node in body.nodes.values():
                    if node.op_type == op_type and body.fits(node, made):
                        return node_variant(body, node.name)
        raise CannotProbeError(NO_FUNCTION)

    return find


def _unfold(graph: Graph, owner: str, deep: bool) -> Graph | None:
    """The expanded function of one node; None without one. `deep`: nested functions, too."""
    node = graph.nodes.get(owner)
    if node is None:
        return None
    domain = plain_domain(node.domain)
    version = {plain_domain(entry.domain): entry.version for entry in graph.proto.opset_import}.get(domain, 1)
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, version, domain)
        if not (schema.has_function or schema.has_context_dependent_function):
            return None  # unfolding every node takes too long
        part = part_model(graph, [owner], fixed=False)
        operator, given = find_operator(domain, node.op_type, version), {entry.name for entry in node.attribute}
        for name, entry in operator.attributes.items() if operator is not None else ():
            if entry.default is not None and name not in given:  # the onnx package needs defaults to inline
                part.graph.node[0].attribute.append(entry.default)
        for tensor in part.graph.initializer:  # the function may depend on their types
            part.graph.value_info.add(name=tensor.name, type=tensor_type(tensor.data_type, tensor.dims))
        chosen = [] if deep else [(domain, node.op_type)]
        body: onnx.ModelProto = onnx.inliner.inline_selected_functions(part, chosen, deep, True)
    except Exception:  # noqa: BLE001 - native code may raise any exception; other nodes can still be tested
        return None
    if [each.op_type for each in body.graph.node] == [node.op_type]:
        return None
    for number, each in enumerate(all_nodes(body.graph)):
        each.name = f"{node.op_type}/{number}"
    fixed = {port.name: sizes_of(graph.fixed.get(port.name)) for port in body.graph.input}
    return cut_proto(body, graph.folder, {name: sizes for name, sizes in fixed.items() if sizes is not None})
