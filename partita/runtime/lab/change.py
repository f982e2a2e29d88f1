"""Changes of a variant: types, sizes, constants, attributes, optional inputs and outputs, opset."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from partita import dtypes
from partita.observations.facts import ProbeRun, Substitution
from partita.runtime.lab.graph import constant_of, cut_proto
from partita.runtime.lab.schema import find_operator
from partita.runtime.lab.variant import ExperimentInput, Variant, node_variant, size_of, variant_model, zeros
from partita.runtime.place.model_file import tensors_read
from partita.runtime.place.tensor_types import (
    SMALL_BYTES,
    element_of,
    is_fixed,
    tensor_type,
    tensor_types,
    with_element,
)

if TYPE_CHECKING:
    import onnx

Variation = tuple[ProbeRun, Variant]
"""The trial of a changed node, without an outcome, and the changed node."""
Attributes = Mapping[str, "onnx.AttributeProto | None"]
"""Attributes with another value; None: omitted."""


def described(
    change: str | Substitution, variant: Variant, *, removes: bool = False, factors: tuple[str, ...] = ()
) -> Variation:
    """A variation, without its factor. `factors`: the factors, if it counts as several changes."""
    words = f"without {change}" if removes else str(change)
    replaced = change if isinstance(change, Substitution) else None
    return ProbeRun("", words, "invalid", "", factors=factors, substitution=replaced, removes=removes), variant


def with_feeds(variant: Variant, change: Callable[[ExperimentInput], ExperimentInput]) -> Variant:
    """The variant with changed inputs."""
    return replace(variant, feeds=tuple(map(change, variant.feeds)))


def fixed_feed(feed: ExperimentInput) -> ExperimentInput:
    """The feed with the sizes of the run, as a constant if its values depend only on sizes."""
    folded = feed.folded
    if feed.constant is not None or folded is None or element_of(feed.kind) != folded.data_type:
        return replace(feed, kind=feed.run_kind) if feed.constant is None else feed
    return replace(feed, kind=tensor_type(folded.data_type, folded.dims), constant=folded)


def with_sizes(variant: Variant, sizes: Mapping[str, Sequence[int | None]]) -> Variant:
    """The variant with other sizes of inputs; constants keep theirs, and declared outputs do not apply."""

    def resized(feed: ExperimentInput) -> ExperimentInput:
        element = element_of(feed.kind)
        if feed.name not in sizes or element is None or feed.constant is not None:
            return feed
        return replace(feed, kind=tensor_type(element, sizes[feed.name]))

    return replace(with_feeds(variant, resized), declared={})


def with_elements(variant: Variant, elements: Mapping[str, int], attributes: Attributes) -> Variant:
    """The variant with other element types of inputs (constants are cast), and with other attributes."""

    def retyped(feed: ExperimentInput) -> ExperimentInput:
        element = elements.get(feed.name)
        if element is None or element_of(feed.kind) in (None, element):
            return feed
        value = cast(feed.constant, element) if feed.constant is not None else None
        return replace(feed, kind=with_element(feed.kind, element), constant=value)

    varied = with_feeds(with_attributes(variant, attributes), retyped)
    if not variant.declared:
        return varied
    known = tensor_types(variant_model(replace(varied, declared={})))
    declared = {name: kind for name, kind in variant.declared.items() if is_fixed(kind) and name in known}
    declared = {name: with_element(kind, element_of(known[name]) or 0) for name, kind in declared.items()}
    return replace(varied, declared=declared)


def with_constants(variant: Variant, names: Collection[str], *, ones: bool = False) -> Variant:
    """The variant with inputs as constants: their values in the run if known, else zeros or small integers of one."""
    return with_feeds(variant, lambda feed: _constant(feed, ones) if feed.name in names else feed)


def _constant(feed: ExperimentInput, ones: bool) -> ExperimentInput:
    """The feed as a constant; unchanged if its type or sizes are unknown."""
    import onnx

    element, sizes, value = element_of(feed.kind), feed.run_sizes, feed.folded or feed.run_value
    if value is not None and element not in (None, value.data_type):
        value = cast(value, element)
    if value is None:
        if element is None or sizes is None:
            return feed
        if ones and len(sizes) <= 1 and dtypes.dtype_numbered(element).kind == "integer":
            value = onnx.helper.make_tensor(feed.name, element, sizes, [1] * math.prod(sizes))
        else:
            value = zeros(feed.name, element, sizes)
    return replace(feed, kind=tensor_type(value.data_type, value.dims), constant=value)


def with_input(variant: Variant, position: int, value: onnx.TensorProto) -> Variant:
    """The variant with a constant as an input that it lacks."""
    node = deepcopy(variant.node)
    node.input.extend([""] * (position + 1 - len(node.input)))
    node.input[position] = value.name
    added = ExperimentInput(value.name, tensor_type(value.data_type, value.dims), value)
    return replace(variant, node=node, feeds=(*variant.feeds, added))


def with_attributes(variant: Variant, attributes: Attributes) -> Variant:
    """The variant with other attributes."""
    node = deepcopy(variant.node)
    changed = {**{entry.name: entry for entry in variant.node.attribute}, **attributes}
    del node.attribute[:]
    node.attribute.extend(entry for entry in changed.values() if entry is not None)
    return replace(variant, node=node)


def without(variant: Variant, inputs: Collection[int] = (), outputs: Collection[int] = ()) -> Variant:
    """The variant without inputs and outputs at these positions; a variant without outputs is not a model."""
    node = deepcopy(variant.node)
    for names, positions in ((node.input, inputs), (node.output, outputs)):
        for position in positions:
            names[position] = ""
        while names and not names[-1] and positions:
            names.pop()
    read = set(tensors_read(node))  # including inputs of subgraphs
    return replace(variant, node=node, feeds=tuple(feed for feed in variant.feeds if feed.name in read))


def cast(tensor: onnx.TensorProto, new: int) -> onnx.TensorProto:
    """A constant in another element type; values that the type cannot hold become zeros."""
    import numpy as np
    import onnx

    if tensor.external_data or size_of(new, tensor.dims) > SMALL_BYTES:
        return zeros(tensor.name, new, tensor.dims)
    try:
        with np.errstate(all="ignore"):
            values = onnx.numpy_helper.to_array(tensor).astype(onnx.helper.tensor_dtype_to_np_dtype(new))
        made: onnx.TensorProto = onnx.numpy_helper.from_array(values, tensor.name)
    except (TypeError, ValueError, KeyError):
        return zeros(tensor.name, new, tensor.dims)
    return made if made.data_type == new else zeros(tensor.name, new, tensor.dims)


# --- operator set versions -------------------------------------------------------------------------------------------


def at_opset(variant: Variant, opset: int) -> Variant | None:
    """The variant in another opset: unchanged if legal there, else converted; None if neither is possible."""
    import onnx

    moved = replace(_without_unknown(variant, opset), opsets={**variant.opsets, variant.node.domain: opset})
    if _legal(moved):
        return moved
    model = variant_model(variant)
    del model.functions[:]
    try:
        converted = onnx.version_converter.convert_version(model, opset)
        # The converter turns an attribute into an input: a constant next to the node.
        (node,) = (node for node in converted.graph.node if constant_of(node) is None)
        made = node_variant(cut_proto(converted, Path(), {}), node.name)
    except Exception:  # noqa: BLE001 - the native converter may raise any exception
        return None
    feeds = tuple(
        replace(variant.feed(feed.name) or feed, kind=feed.kind, constant=feed.constant) for feed in made.feeds
    )
    changed = replace(moved, node=made.node, feeds=feeds)
    return changed if node.op_type == variant.node.op_type and _legal(changed) else None


def _without_unknown(variant: Variant, opset: int) -> Variant:
    """The variant without attributes at their default that another opset does not define."""
    now, then = variant.operator, find_operator(variant.node.domain, variant.node.op_type, opset)
    if now is None or then is None:
        return variant
    unknown = [
        entry.name
        for entry in variant.node.attribute
        if entry.name not in then.attributes
        and entry.name in now.attributes
        and now.attributes[entry.name].default == entry.SerializeToString()
    ]
    return with_attributes(variant, dict.fromkeys(unknown))


def _legal(variant: Variant) -> bool:
    """Whether attributes, number of inputs, and input types fit the opset."""
    operator, node = variant.operator, variant.node
    if operator is None or any(attribute.name not in operator.attributes for attribute in node.attribute):
        return False
    given = {attribute.name for attribute in node.attribute}
    if any(entry.required and name not in given for name, entry in operator.attributes.items()):
        return False
    if len(node.input) < sum(not slot.optional for slot in operator.inputs if not slot.variadic):
        return False
    read = [(operator.input(position), variant.feed(name)) for position, name in enumerate(node.input)]
    return all(
        slot is not None and (feed is None or element_of(feed.kind) in (None, *slot.elements)) for slot, feed in read
    )
