"""A change of a variant: types, sizes, constants, attributes, optional inputs and outputs, opset."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from partita.observations.facts import Substitution
from partita.runtime.lab.graph import constant_of, cut_proto
from partita.runtime.lab.schema import Operator, find_operator
from partita.runtime.lab.variant import ExperimentInput, Variant, node_variant, size_of, variant_model, zeros
from partita.runtime.place.model_file import tensors_read
from partita.runtime.place.tensor_types import (
    SMALL_BYTES,
    element_of,
    rank_of,
    sizes_of,
    tensor_type,
    tensor_types,
    with_element,
)

if TYPE_CHECKING:
    import onnx
    from google.protobuf.internal.containers import RepeatedScalarFieldContainer  # type: ignore[import-untyped]


@dataclass(frozen=True, slots=True)
class Change:
    """The differences of a variant from its node. Inputs are named as in the variant."""

    words: str = ""
    """The change in words, without `without` for a change that removes something; empty with `substitution`."""
    substitution: Substitution | None = None
    """The replacement, if something is replaced."""
    removes: bool = False
    """The change removes something."""
    factors: tuple[str, ...] = ()
    """The factors, if it counts as several changes."""
    elements: Mapping[str, int] = field(default_factory=dict)
    """Element types of inputs; constants are cast."""
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Sizes of inputs; constants keep theirs."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks of inputs; all their sizes stay symbolic."""
    fixed: bool = False
    """Use the sizes of the run, and make constants of the values that depend on them."""
    constants: Mapping[str, onnx.TensorProto | None] = field(default_factory=dict)
    """Inputs that become constants with these values; None: their values in the run if known, else zeros."""
    attributes: Mapping[str, onnx.AttributeProto | None] = field(default_factory=dict)
    """Attributes with another value; None: omitted."""
    omitted_inputs: frozenset[int] = frozenset()
    """Input positions to omit, because a tensor may be read at several positions."""
    omitted_outputs: frozenset[int] = frozenset()
    added: Mapping[int, ExperimentInput] = field(default_factory=dict)
    """Positions of absent inputs, and what they become."""
    opset: int | None = None
    """Opset of the operator's domain."""
    declared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Declared sizes of outputs."""

    def __str__(self) -> str:
        return str(self.substitution or (f"without {self.words}" if self.removes else self.words))


def vary(variant: Variant, change: Change) -> Variant | None:
    """The changed variant; None when no output would be left, or the operator set has no such node."""
    node = deepcopy(variant.node)
    attributes = {**{entry.name: entry for entry in variant.node.attribute}, **change.attributes}
    del node.attribute[:]
    node.attribute.extend(entry for entry in attributes.values() if entry is not None)
    _leave_out(node.input, change.omitted_inputs)
    _leave_out(node.output, change.omitted_outputs)
    if not node.output:
        return None
    for position, feed in change.added.items():
        node.input.extend([""] * (position + 1 - len(node.input)))
        node.input[position] = feed.name
    left = set(tensors_read(node))  # including inputs of subgraphs
    feeds = tuple(_vary_feed(feed, change) for feed in (*variant.feeds, *change.added.values()) if feed.name in left)
    varied = replace(variant, node=node, feeds=feeds)
    if change.declared or variant.declared:
        varied = replace(varied, declared=_declared(varied, change))
    return varied if change.opset is None else _at_opset(varied, change.opset)


def _leave_out(names: RepeatedScalarFieldContainer[str], positions: Collection[int]) -> None:
    """Omit inputs or outputs: remove them at the end, else leave an empty name."""
    for position in positions:
        names[position] = ""
    while names and not names[-1] and positions:
        names.pop()


def _vary_feed(feed: ExperimentInput, change: Change) -> ExperimentInput:
    """One input of a variant."""
    if change.fixed:
        feed = fixed_feed(feed)
    element = change.elements.get(feed.name)
    if element is not None and element_of(feed.kind) not in (None, element):
        value = cast(feed.constant, element) if feed.constant is not None else None
        feed = replace(feed, kind=with_element(feed.kind, element), constant=value)
    sizes: Sequence[int | None] | None = change.sizes.get(feed.name)
    if sizes is None and feed.name in change.ranks and rank_of(feed.kind) is None:
        sizes = [None] * change.ranks[feed.name]
    element = element_of(feed.kind)
    if sizes is not None and element is not None and feed.constant is None:
        feed = replace(feed, kind=tensor_type(element, sizes))
    return _constant(feed, change.constants[feed.name]) if feed.name in change.constants else feed


def fixed_feed(feed: ExperimentInput) -> ExperimentInput:
    """The feed with the sizes of the run, as a constant if its values depend only on sizes."""
    folded = feed.folded
    if feed.constant is not None or folded is None or element_of(feed.kind) != folded.data_type:
        return replace(feed, kind=feed.run_kind) if feed.constant is None else feed
    return replace(feed, kind=tensor_type(folded.data_type, folded.dims), constant=folded)


def _constant(feed: ExperimentInput, value: onnx.TensorProto | None) -> ExperimentInput:
    """The feed as a constant; unchanged if its type or sizes are unknown."""
    element, sizes, value = element_of(feed.kind), feed.run_sizes, value or feed.folded or feed.run_value
    if value is not None and element not in (None, value.data_type):
        value = cast(value, element)
    if value is None:
        if element is None or sizes is None:
            return feed
        value = zeros(feed.name, element, sizes)
    return replace(feed, kind=tensor_type(value.data_type, value.dims), constant=value)


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


def _declared(variant: Variant, change: Change) -> dict[str, onnx.TypeProto]:
    """Declared outputs of a variant, with inferred types; none when sizes of inputs changed."""
    if change.sizes:
        return {}
    sizes = {name: sizes_of(kind) for name, kind in variant.declared.items()} | dict(change.declared)
    known = tensor_types(variant_model(replace(variant, declared={})))
    elements = {name: element_of(known[name]) for name in variant.node.output if name in known}
    return {
        name: tensor_type(element, each)
        for name, each in sizes.items()
        if each is not None and (element := elements.get(name))
    }


# --- operator schema -----------------------------------------------------------------------------------------------


def operator_of(variant: Variant) -> Operator | None:
    """The variant's version of the operator; None for an unknown operator."""
    node = variant.node
    return find_operator(node.domain, node.op_type, variant.opsets.get(node.domain, 1))


def _at_opset(variant: Variant, opset: int) -> Variant | None:
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
    now, then = operator_of(variant), find_operator(variant.node.domain, variant.node.op_type, opset)
    if now is None or then is None:
        return variant
    node = deepcopy(variant.node)
    del node.attribute[:]
    node.attribute.extend(
        entry
        for entry in variant.node.attribute
        if entry.name in then.attributes
        or entry.name not in now.attributes
        or now.attributes[entry.name].default != entry.SerializeToString()
    )
    return replace(variant, node=node)


def _legal(variant: Variant) -> bool:
    """Whether attributes, number of inputs, and input types fit the opset."""
    operator, node = operator_of(variant), variant.node
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
