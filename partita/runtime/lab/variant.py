"""A part of a graph as a model of its own: one node for an experiment, several for a bisection.

Inputs keep type, shape and, where they are constants of the graph, that they are constants: small ones with their
values, large ones as zeros, which no placement was seen to depend on. Names are made plain, so that nodes that differ
in their names only give the same model.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita import dtypes
from partita.runtime.lab.graph import CannotProbeError, Graph, called, free_names, inner_names, rename
from partita.runtime.lab.schema import plain_domain
from partita.runtime.place.model_file import all_graphs, bodies, reads
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
"""Name of the Neg beside it, and prefix of the names of any other nodes beside it."""
AFTER = f"{AUXILIARY}_after"
"""Name of a second Neg, after the node."""
DETACHED = "detached"
"""Graph input of a Neg that is not connected to the node."""
NOTHING_ADDED: tuple[tuple[str, ...], frozenset[str]] = ((), frozenset())
SIGNED = frozenset(dtypes.numbers("float32", "int32", "int64", "float16"))
(FLOAT,) = dtypes.numbers("float32")
POINTER_BYTES = 8
ZEROS = "zeros.bin"
"""Sparse file of zeros, the external data of large constants."""
RUN = "partita.run"
"""Metadata of a model that is also run once its node is taken: sizes of its inputs, by name, in JSON."""
MOST_RUN = 1 << 24
"""Elements of all inputs and constants of a node that is run."""
ORIGINAL = "partita.original"
"""Metadata of a changed node in a dry run: the original node's model and the sizes of the inputs, in JSON."""
MOST_COMPARED = 1 << 22
"""Elements of all inputs and constants of a node that is run on the CPU provider."""
SAME_VALUES = frozenset({"opset", "static_shape", "input", "output_shape", "rank"})
"""Changes after which a node computes the same as before."""
FLOATS = frozenset(dtypes.numbers("float32", "float16", "float64"))


@dataclass(frozen=True, slots=True)
class Feed:
    """What one input of an experiment is."""

    name: str
    kind: onnx.TypeProto
    constant: onnx.TensorProto | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One node with everything that an experiment needs."""

    node: onnx.NodeProto
    feeds: tuple[Feed, ...]
    """One for each name that the node or its bodies read."""
    fixed: Mapping[str, onnx.TypeProto]
    """The same inputs with the sizes of the run, where they are known."""
    folded: Mapping[str, onnx.TensorProto]
    """Inputs that are constants then."""
    opsets: Mapping[str, int]
    ir_version: int
    functions: tuple[onnx.FunctionProto, ...] = field(default=())
    given: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    """What inputs are in the run, where that is known of those that are no constants."""
    signed_output: str = ""
    """An output that can be negated; empty when none is known to."""
    passed_on: frozenset[str] = frozenset()
    """Outputs that are no outputs of the graph: other nodes read them, if any does."""
    made: Mapping[str, onnx.TypeProto] = field(default_factory=dict)
    """Outputs with the sizes of the run, where they are known."""
    declared: Mapping[str, onnx.TypeProto] = field(default_factory=dict)
    """Outputs with sizes that the experiment declares, for they follow from values."""

    def feed(self, name: str) -> Feed | None:
        """The feed of an input; None for one that is left out."""
        return next((feed for feed in self.feeds if feed.name == name), None)


def node_variant(graph: Graph, name: str) -> Variant:
    """The variant of one node. Raises CannotProbeError when a type is not known."""
    original = graph.find(name)
    if original is None:
        raise CannotProbeError("it is not in the ONNX file")
    node = deepcopy(original)
    node.name, node.doc_string, node.domain = NODE, "", plain_domain(original.domain)
    del node.metadata_props[:]
    _lighten_bodies(node, graph.folder)
    inside = inner_names(original)
    plain = dict(zip(dict.fromkeys(reads(original)), free_names("i", inside), strict=False))
    rename(node, plain)
    outputs = dict(zip(filter(None, original.output), free_names("o", inside), strict=False))
    for position, old in enumerate(original.output):
        node.output[position] = outputs.get(old, "")
    feeds = tuple(_make_feed(graph, old, new) for old, new in plain.items())
    fixed = {new: graph.fixed[old] for old, new in plain.items() if is_fixed(graph.fixed.get(old))}
    folded, given = (
        {new: _light_constant(known[old], new, graph.folder) for old, new in plain.items() if old in known}
        for known in (graph.folded, graph.given)
    )
    variant = Variant(
        node,
        feeds,
        fixed,
        folded,
        {plain_domain(entry.domain): entry.version for entry in graph.proto.opset_import},
        graph.proto.ir_version,
        called(graph.proto, [original]),
        given,
        next((new for old, new in outputs.items() if old in graph.types and is_signed(graph.types[old])), ""),
        frozenset(new for old, new in outputs.items() if old not in graph.outputs),
        {new: graph.fixed[old] for old, new in outputs.items() if is_fixed(graph.fixed.get(old))},
    )
    declared = {new: graph.declared[old] for old, new in outputs.items() if old in graph.declared}
    return replace(variant, declared=_not_inferred(variant, declared)) if declared else variant


def _not_inferred(variant: Variant, declared: Mapping[str, onnx.TypeProto]) -> dict[str, onnx.TypeProto]:
    """Outputs whose sizes the file gives, and that do not follow from the inputs: without them it is another node."""
    known = tensor_types(variant_model(variant))
    return {name: kind for name, kind in declared.items() if not is_fixed(known.get(name))}


def _make_feed(graph: Graph, old: str, new: str) -> Feed:
    """The feed that stands for the tensor `old` of the graph. Raises CannotProbeError."""
    constant = graph.constants.get(old)
    if constant is not None:
        return Feed(new, tensor_type(constant.data_type, constant.dims), _light_constant(constant, new, graph.folder))
    kind = graph.types.get(old) or graph.fixed.get(old)
    if kind is None:
        raise CannotProbeError(f"the type of its input {old!r} is not known")
    return Feed(new, kind)


def _light_constant(tensor: onnx.TensorProto, name: str, folder: Path) -> onnx.TensorProto:
    """A constant with its values when they are few, else with zeros."""
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


def _lighten_bodies(node: onnx.NodeProto, folder: Path) -> None:
    """Bring the constants of its bodies with it: the file that they lie in is not beside an experiment."""
    for body in bodies(node):
        for graph in all_graphs(body):
            for tensor in graph.initializer:
                tensor.CopyFrom(_light_constant(tensor, tensor.name, folder))


def zeros(name: str, element: int, sizes: Sequence[int]) -> onnx.TensorProto:
    """A constant of zeros: from the file of zeros when it is large."""
    import onnx

    length = size_of(element, sizes)
    tensor = onnx.TensorProto(name=name, data_type=element, dims=list(sizes))
    if element == onnx.TensorProto.STRING:  # cannot lie in another file
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
    """Bytes of a tensor: types of less than a byte are packed, and a text counts as what points to it."""
    kind = dtypes.numbered(element)
    return math.prod(sizes) * POINTER_BYTES if kind.bits is None else dtypes.size_bytes(kind.name, sizes)


def variant_model(variant: Variant, *, auxiliary: bool = False) -> onnx.ModelProto:
    """The model of one experiment. Outputs have no type but a declared one: ONNX Runtime infers it, also where it was
    changed.

    `auxiliary`: with a Neg beside the node. A provider that compiles may take no partition of a single node.
    """
    return finish(variant_graph(variant, auxiliary=auxiliary), variant.opsets, variant.ir_version, variant.functions)


def variant_graph(variant: Variant, *, auxiliary: bool = False) -> onnx.GraphProto:
    """The graph of `variant_model`, without opsets and functions."""
    import onnx

    graph = onnx.GraphProto(name=NODE)
    graph.node.add().CopyFrom(variant.node)
    added, inside = (
        _add_auxiliary(graph, variant.feeds, variant.signed_output, variant.passed_on) if auxiliary else NOTHING_ADDED
    )
    _add_feeds(graph, variant.feeds)
    for name in (*variant.node.output, *added):
        if name and name not in inside:
            graph.output.add(name=name, type=variant.declared.get(name))
    for name in inside & variant.declared.keys():
        graph.value_info.add(name=name, type=variant.declared[name])
    return graph


def _add_auxiliary(
    graph: onnx.GraphProto, feeds: Sequence[Feed], signed_output: str, passed_on: frozenset[str] = frozenset()
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Put a Neg before the only node, or after it where no input can be negated: the outputs that this adds, and those
    of the node that are none of the graph then. Some providers treat a node before an output of the graph otherwise.

    Where the node reads constants alone, a Neg stands apart: a provider may open no graph without an input.
    """
    import onnx

    (node,) = graph.node
    first = next((feed for feed in feeds if feed.constant is None and is_signed(feed.kind)), None)
    if first is not None and first.name in node.input:
        rename(node, {first.name: AUXILIARY})
        graph.node.insert(0, onnx.helper.make_node("Neg", [first.name], [AUXILIARY], name=AUXILIARY))
        return NOTHING_ADDED
    fed = any(feed.constant is None for feed in feeds)
    apart = () if fed else (add_detached(graph),)
    if not signed_output or not (fed or signed_output in passed_on):
        return apart, frozenset()
    after = AUXILIARY if fed else AFTER
    graph.node.append(onnx.helper.make_node("Neg", [signed_output], [after], name=after))
    return (after, *apart), passed_on & {signed_output}


def add_detached(graph: onnx.GraphProto) -> str:
    """Add a Neg of floats, which most providers support, with its own input; the name of its output."""
    import onnx

    output = f"{DETACHED}_{AUXILIARY}"
    graph.node.insert(0, onnx.helper.make_node("Neg", [DETACHED], [output], name=AUXILIARY))
    graph.input.add(name=DETACHED, type=tensor_type(FLOAT, (1,)))
    return output


def is_signed(kind: onnx.TypeProto) -> bool:
    """Whether a tensor can be negated on nearly every provider."""
    return kind.WhichOneof("value") == "tensor_type" and kind.tensor_type.elem_type in SIGNED


def part_model(graph: Graph, names: Sequence[str], *, fixed: bool = True, auxiliary: bool = False) -> onnx.ModelProto:
    """The model of several nodes, in the sizes of the run unless `fixed` is False. `auxiliary`: as in `variant_model`.

    Raises CannotProbeError when a type is not known.
    """
    import onnx

    chosen = [graph.nodes[name] for name in names]
    made = {output for node in chosen for output in node.output if output}
    part = onnx.GraphProto(name=NODE)
    part.node.extend(chosen)
    for node in part.node:
        _lighten_bodies(node, graph.folder)
    needed = dict.fromkeys(name for node in chosen for name in reads(node) if name not in made)
    feeds = []
    for name in needed:
        feed = _make_feed(graph, name, name)
        if fixed and feed.constant is None and is_fixed(graph.fixed.get(name)):
            feed = replace(feed, kind=graph.fixed[name])
        feeds.append(feed)
    if auxiliary and len(chosen) == 1 and any(feed.constant is None for feed in feeds):
        _add_auxiliary(part, feeds, "")
    _add_feeds(part, feeds)
    outside = {name for node in graph.proto.graph.node if node.name not in set(names) for name in reads(node)}
    outside |= {port.name for port in graph.proto.graph.output}
    read_inside = {name for node in chosen for name in reads(node)}
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
    return finish(part, opsets, graph.proto.ir_version, called(graph.proto, chosen))


def _add_feeds(graph: onnx.GraphProto, feeds: Sequence[Feed]) -> None:
    """Constants as initializers, the others as inputs."""
    for feed in feeds:
        if feed.constant is not None:
            graph.initializer.add().CopyFrom(feed.constant)
        else:
            graph.input.add(name=feed.name, type=feed.kind)


def finish(
    graph: onnx.GraphProto, opsets: Mapping[str, int], ir_version: int, functions: Sequence[onnx.FunctionProto]
) -> onnx.ModelProto:
    """The model around a graph."""
    import onnx

    model = onnx.ModelProto(ir_version=ir_version)
    model.graph.CopyFrom(graph)
    model.functions.extend(functions)
    for domain, version in sorted(opsets.items()):
        model.opset_import.add(domain=domain, version=version)
    return model


def to_run(model: onnx.ModelProto, variant: Variant) -> onnx.ModelProto:
    """The model of a variant, marked to be run where sizes are known and small and all inputs are floats."""
    known = _sizes_in_run(variant, variant, MOST_RUN)
    if known is not None and _reads_floats(variant):
        given = {feed.name: known[feed.name] for feed in variant.feeds if feed.constant is None}
        model.metadata_props.add(key=RUN, value=json.dumps(given))
    return model


def with_original(model: onnx.ModelProto, changed: Variant, original: Variant, factor: str) -> onnx.ModelProto:
    """The model of a changed node, marked to be compared with the original node on the CPU provider (dry runs)."""
    known = _sizes_in_run(changed, original, MOST_COMPARED)
    request: dict[str, Any] = {"sizes": known}
    if known is not None:
        request |= {
            "floats": _reads_floats(changed),
            "same_values": factor in SAME_VALUES,
            "model": base64.b64encode(variant_model(original).SerializeToString(deterministic=True)).decode(),
        }
    model.metadata_props.add(key=ORIGINAL, value=json.dumps(request, sort_keys=True))
    return model


def _sizes_in_run(changed: Variant, original: Variant, most: int) -> dict[str, tuple[int, ...]] | None:
    """Sizes of all inputs in the run, by name; None where some are unknown, or they have `most` elements or more."""
    known: dict[str, tuple[int, ...]] = {}
    for feed in changed.feeds:
        sizes = _sizes(changed, feed.name) or _sizes(original, feed.name)
        if sizes is None:
            return None
        known[feed.name] = sizes
    small = sum(map(math.prod, known.values())) < most
    return known if small and not changed.declared else None


def _sizes(variant: Variant, name: str) -> tuple[int, ...] | None:
    """Sizes of an input in the run; None where they are unknown."""
    feed = variant.feed(name)
    return sizes_of(feed.kind if feed is not None and is_fixed(feed.kind) else variant.fixed.get(name))


def _reads_floats(variant: Variant) -> bool:
    """Whether all inputs that are not constants are floats."""
    return all(feed.constant or element_of(feed.kind) in FLOATS for feed in variant.feeds)


def fingerprint(model: onnx.ModelProto) -> str:
    """The same for models that are the same."""
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def identity(variant: Variant) -> tuple[object, ...]:
    """The same for cases whose experiments are the same: their models, and what changes of them are made from."""
    return (
        fingerprint(variant_model(variant)),
        variant.signed_output,
        variant.passed_on,
        *(
            tuple((name, known[name].SerializeToString(deterministic=True)) for name in sorted(known))
            for known in (variant.fixed, variant.folded, variant.given, variant.made, variant.declared)
        ),
    )


def zeros_needed(models: Sequence[onnx.ModelProto]) -> int:
    """Length of the file of zeros that these models read."""
    lengths = [
        int(entry.value)
        for model in models
        for graph in all_graphs(model.graph)
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "length"
    ]
    return max(lengths, default=0)
