"""Changes of a variant, and the variations of its element types and attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita import dtypes
from partita.observations.facts import ProbeRun, Substitution
from partita.runtime.lab.forms import plainest_forms, value_text
from partita.runtime.lab.graph import constant_of, cut_proto
from partita.runtime.lab.schema import TYPE_ATTRIBUTES, Operator, find_operator
from partita.runtime.lab.variant import ExperimentInput, Variant, node_variant, size_of, variant_model, zeros
from partita.runtime.place.model_file import tensors_read
from partita.runtime.place.tensor_types import (
    SMALL_BYTES,
    element_of,
    is_fixed,
    rank_of,
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
    """The variant with other sizes of inputs (None: unknown); constants keep theirs.

    Declared outputs do not apply to other sizes.
    """

    def resized(feed: ExperimentInput) -> ExperimentInput:
        element = element_of(feed.kind)
        if feed.name not in sizes or element is None or feed.constant is not None:
            return feed
        return replace(feed, kind=tensor_type(element, sizes[feed.name]))

    resizes = any(size is not None for known in sizes.values() for size in known)
    return replace(with_feeds(variant, resized), declared={} if resizes else variant.declared)


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


# --- element types ---

FLOAT, UINT8, INT8, INT32, INT64 = dtypes.numbers("float32", "uint8", "int8", "int32", "int64")
FLOAT16, DOUBLE, UINT32, BFLOAT16, STRING = dtypes.numbers("float16", "float64", "uint32", "bfloat16", "string")
FLOATS = (FLOAT, FLOAT16, BFLOAT16, DOUBLE)
INTEGERS = (INT32, INT64, UINT32, UINT8, INT8)
OTHERS = (FLOAT, FLOAT16, INT32, INT8, UINT8, INT64)
"""Element types to test, most likely supported first, for floats, integers, and others."""
VALUE_ATTRIBUTES = frozenset({"value"})
"""Attributes with a tensor whose type is that of an output."""
MOST_TYPES = 5


def other_types(variant: Variant) -> Iterator[Variation]:
    """All inputs of one element type in another, if the operator allows it; then attributes that set a type."""
    for old in dict.fromkeys(element_of(feed.kind) for feed in variant.feeds):
        changes = ((new, _in_new_type(variant, old, new)) for new in _candidates(old)) if old is not None else ()
        for new, elements in islice((each for each in changes if each[1]), MOST_TYPES):
            yield described(_types(old or 0, new), with_elements(variant, elements, {}))
    for attribute in variant.node.attribute:
        if old := _type_of(attribute):
            for new in _candidates(old)[:MOST_TYPES]:
                changed = with_elements(variant, {}, {attribute.name: _attribute_in(attribute, new)})
                yield described(_types(old, new, f"as {attribute.name}"), changed)


def _type_of(attribute: onnx.AttributeProto) -> int:
    """The element type that an attribute sets for an output; 0 for other attributes."""
    if attribute.name in TYPE_ATTRIBUTES:
        return int(attribute.i)
    is_value = attribute.name in VALUE_ATTRIBUTES and attribute.HasField("t") and not attribute.t.external_data
    return int(attribute.t.data_type) if is_value else 0


def _attribute_in(attribute: onnx.AttributeProto, new: int) -> onnx.AttributeProto:
    """An attribute with another element type or tensor type."""
    changed = deepcopy(attribute)
    if attribute.name in TYPE_ATTRIBUTES:
        changed.i = new
    else:
        changed.t.CopyFrom(cast(attribute.t, new))
    return changed


def _candidates(old: int) -> tuple[int, ...]:
    """Element types to test instead of `old`, most likely supported first."""
    order: tuple[int, ...] = (
        (*FLOATS, INT32, INT8, UINT8) if old in FLOATS else (INT32, INT64, FLOAT, FLOAT16, INT8, UINT8, UINT32)
    )
    if old not in FLOATS and old not in INTEGERS:
        order = OTHERS
    return tuple(entry for entry in order if entry != old)


def _in_new_type(variant: Variant, old: int, new: int) -> dict[str, int]:
    """The inputs of the old type, with the new type, if the operator allows it."""
    return {
        feed.name: new for feed in variant.feeds if element_of(feed.kind) == old and _allows(variant, feed.name, new)
    }


def _allows(variant: Variant, name: str, new: int) -> bool:
    """Whether the operator allows the type at every position of `name`; True for unknown operators."""
    if (operator := variant.operator) is None:
        return True
    slots = [operator.input(position) for position, other in enumerate(variant.node.input) if other == name]
    return bool(slots) and all(slot is not None and new in slot.elements for slot in slots)


def _types(old: int, new: int, where: str = "") -> Substitution:
    """`float32 in place of int64`."""
    return Substitution(dtypes.dtype_numbered(new).name, dtypes.dtype_numbered(old).name, where)


# --- attribute values ------------------------------------------------------------------------------------------------

SIMPLE = frozenset({"int", "string", "ints"})
"""Attribute kinds whose values are varied."""
MOST_SHOWN = 8
"""Maximum number of values of one attribute in a text."""
MOST_VALUES = 8
"""Maximum number of other values per node."""


def other_attributes(variant: Variant) -> Iterator[Variation]:
    """Each optional attribute omitted, also without optional outputs that it may have required; then other values."""
    operator = variant.operator
    fewer = operator.optional_outputs(variant.node) if operator is not None else {}
    for attribute in variant.node.attribute:
        if _may_omit(attribute, operator):
            text, changed = _attribute_text(attribute), with_attributes(variant, {attribute.name: None})
            yield described(text, changed, removes=True)
            if fewer:
                yield described(f"{text} and its optional outputs", without(changed, outputs=fewer), removes=True)
    if operator is not None:
        yield from islice(_other_values(variant, operator), MOST_VALUES)


def _other_values(variant: Variant, operator: Operator) -> Iterator[Variation]:
    """Attributes with other values: those of the operator's examples, the default, 1 for 0, 0 for 1."""
    import onnx

    given = {
        attribute.name: onnx.helper.get_attribute_value(attribute)
        for attribute in variant.node.attribute
        if attribute.name in operator.attributes
        and operator.attributes[attribute.name].kind in SIMPLE
        and attribute.type
        and not attribute.ref_attr_name
    }
    for name, entry in operator.attributes.items():
        if name in TYPE_ATTRIBUTES or entry.kind not in SIMPLE:
            continue
        default = _hashable(_default(entry.default))
        now = _hashable(given[name]) if name in given else default
        values = [_hashable(form.attributes[name]) for form in plainest_forms(operator) if name in form.attributes]
        # An attribute is a switch if 0 is known to be legal for it.
        switch = entry.kind == "int" and now in (0, 1) and 0 in (now, default, *values)
        for value in dict.fromkeys((default, *values, *((1 - now,) if switch else ()))):
            # The default is covered by omitting the attribute.
            if value is None or value == now or (value == default and name in given):
                continue
            if name == "axis" and not _is_axis(variant, value):
                continue
            kind = getattr(onnx.AttributeProto, entry.kind.upper())  # a list may be empty
            made = onnx.helper.make_attribute(name, list(value) if isinstance(value, tuple) else value, attr_type=kind)
            before = f"{name}={value_text(now)}" if now is not None else f"{name} omitted"
            changed = with_attributes(variant, {name: made})
            yield described(Substitution(f"{name}={value_text(value)}", before), changed)


def _is_axis(variant: Variant, value: Any) -> bool:
    """Whether the first input has this axis; True if its rank is unknown."""
    feed = variant.feed(variant.node.input[0]) if variant.node.input else None
    rank = rank_of(feed.kind) if feed is not None else None
    return rank is None or (isinstance(value, int) and -rank <= value < rank)


def _default(raw: bytes) -> Any:
    """The value of a serialised attribute; None for an empty one."""
    import onnx

    return onnx.helper.get_attribute_value(onnx.AttributeProto.FromString(raw)) if raw else None


def _hashable(value: Any) -> Any:
    """An attribute value as a hashable Python value."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return tuple(map(_hashable, value)) if several else value


def _may_omit(attribute: onnx.AttributeProto, operator: Operator | None) -> bool:
    """Whether an attribute is optional and differs from its default."""
    if (
        operator is None
        or (entry := operator.attributes.get(attribute.name)) is None
        or entry.required
        or attribute.name in TYPE_ATTRIBUTES
    ):
        return False
    return bool(entry.default != attribute.SerializeToString())


def _attribute_text(attribute: onnx.AttributeProto) -> str:
    """An attribute with its value, as text."""
    import onnx

    value = _hashable(onnx.helper.get_attribute_value(attribute))
    if not isinstance(value, int | float | str | tuple):
        return f"{attribute.name}=(a tensor or graph)"
    if isinstance(value, tuple) and len(value) > MOST_SHOWN:
        return f"{attribute.name}={len(value)} values"
    return f"{attribute.name}={value_text(value)}"
