"""Changes of a variant, and the variations of its element types and attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from partita import dtypes
from partita.observations.facts import COMBINED, ProbeRun, Substitution
from partita.runtime.lab.forms import make_attribute, plainest_forms, value_text
from partita.runtime.lab.graph import constant_of, cut_proto
from partita.runtime.lab.schema import TYPE_ATTRIBUTES, Attribute, Operator, find_operator
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


def together(one: ProbeRun, two: ProbeRun) -> ProbeRun:
    """The trial of two changes at once, without an outcome; what they remove is named last."""
    words = " and ".join(trial.change for trial in sorted((one, two), key=lambda trial: trial.removes))
    return ProbeRun(COMBINED, words, "invalid", "", factors=(*one.parts, *two.parts), neg_added=one.neg_added)


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


def with_constants(variant: Variant, names: Sequence[str], *, counted: bool = False) -> Variant:
    """The variant with inputs as constants: their values in the run if known, else zeros.

    `counted`: 1 for small integers of the first input, 2 for those of the second, and so on, in place of 0. Declared
    output sizes need not hold for other values than those of the run.
    """
    numbers = {name: number if counted else 0 for number, name in enumerate(names, 1)}
    changed = with_feeds(variant, lambda feed: _constant(feed, numbers[feed.name]) if feed.name in numbers else feed)
    invented = any(feed.name in names and (feed.folded or feed.run_value) is None for feed in variant.feeds)
    return replace(changed, declared={}) if invented else changed


def _constant(feed: ExperimentInput, number: int) -> ExperimentInput:
    """The feed as a constant; unchanged if its type or sizes are unknown."""
    element, sizes, value = element_of(feed.kind), feed.run_sizes, feed.folded or feed.run_value
    if value is not None and element not in (None, value.data_type):
        value = cast(value, element)
    if value is None:
        if element is None or sizes is None:
            return feed
        if number and len(sizes) <= 1 and dtypes.dtype_numbered(element).kind == "integer":
            value = onnx.helper.make_tensor(feed.name, element, sizes, [number] * math.prod(sizes))
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
    known = {name: entry.default for name, entry in now.attributes.items() if name not in then.attributes}
    unknown = [each.name for each in variant.node.attribute if known.get(each.name) == each]
    return with_attributes(variant, dict.fromkeys(unknown))


def _legal(variant: Variant) -> bool:
    """Whether attributes, number of inputs, and input types fit the opset."""
    operator, node = variant.operator, variant.node
    given = {attribute.name for attribute in node.attribute}
    if operator is None or not given <= operator.attributes.keys():
        return False
    if any(entry.required and name not in given for name, entry in operator.attributes.items()):
        return False
    if len(node.input) < sum(not slot.optional for slot in operator.inputs if not slot.variadic):
        return False
    read = [(operator.input(position), variant.feed(name)) for position, name in enumerate(node.input)]
    return all(
        slot is not None and (feed is None or element_of(feed.kind) in (None, *slot.elements)) for slot, feed in read
    )


# --- element types ---

FLOATS = dtypes.numbers("float32", "float16", "bfloat16", "float64")
FOR_FLOATS = (*FLOATS, *dtypes.numbers("int32", "int8", "uint8"))
INTEGERS = dtypes.numbers("int32", "int64", "uint32", "uint8", "int8")
FOR_INTEGERS = dtypes.numbers("int32", "int64", "float32", "float16", "int8", "uint8", "uint32")
FOR_OTHERS = dtypes.numbers("float32", "float16", "int32", "int8", "uint8", "int64")
"""Element types to test in place of floats, integers, and others, most likely supported first."""
CANDIDATES = {**dict.fromkeys(FLOATS, FOR_FLOATS), **dict.fromkeys(INTEGERS, FOR_INTEGERS)}
VALUE = "value"
"""Attribute with a tensor whose type is that of an output."""
MOST_TYPES = 5


def other_types(variant: Variant) -> Iterator[Variation]:
    """All inputs of one element type in another, if the operator allows it; then attributes that set a type."""
    elements = {feed.name: element_of(feed.kind) for feed in variant.feeds}
    for old in filter(None, dict.fromkeys(elements.values())):
        names = [name for name, element in elements.items() if element == old]
        changes = ((new, [name for name in names if _allows(variant, name, new)]) for new in _candidates(old))
        for new, changed in islice((each for each in changes if each[1]), MOST_TYPES):
            yield described(_types(old, new), with_elements(variant, dict.fromkeys(changed, new), {}))
    for attribute in variant.node.attribute:
        name, tensor = attribute.name, attribute.t
        if name not in TYPE_ATTRIBUTES and (name != VALUE or not tensor.data_type or tensor.external_data):
            continue
        old = attribute.i or tensor.data_type
        for new in _candidates(old)[:MOST_TYPES] if old else ():
            made = onnx.helper.make_attribute(name, cast(tensor, new) if tensor.data_type else new)
            yield described(_types(old, new, f"as {name}"), with_elements(variant, {}, {name: made}))


def _candidates(old: int) -> list[int]:
    """Element types to test instead of `old`, most likely supported first."""
    return [element for element in CANDIDATES.get(old, FOR_OTHERS) if element != old]


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
    """Each optional attribute omitted; then other values; then omitted without outputs that it may have required."""
    if (operator := variant.operator) is None:
        return
    fewer, omitted = operator.optional_outputs(variant.node), list[Variation]()
    for attribute in variant.node.attribute:
        name, entry = attribute.name, operator.attributes.get(attribute.name)
        if entry is not None and not entry.required and name not in TYPE_ATTRIBUTES and entry.default != attribute:
            text, changed = _attribute_text(attribute), with_attributes(variant, {name: None})
            yield described(text, changed, removes=True)
            omitted.append(described(f"{text} and its optional outputs", without(changed, outputs=fewer), removes=True))
    yield from islice(_other_values(variant, operator), MOST_VALUES)
    yield from omitted if fewer else ()


def _other_values(variant: Variant, operator: Operator) -> Iterator[Variation]:
    """Attributes with other values: those of the operator's examples, the default, 1 for 0, 0 for 1.

    The first values of all attributes come before their second ones.
    """
    given = {each.name: each for each in variant.node.attribute if each.type and not each.ref_attr_name}

    def values(name: str, entry: Attribute) -> Iterator[Variation]:
        default, now = _value(entry.default), _value(given.get(name, entry.default))
        before = f"{name}={value_text(now)}" if now is not None else f"{name} omitted"
        listed = [_hashable(form.attributes[name]) for form in plainest_forms(operator) if name in form.attributes]
        # An attribute is a switch if 0 is known to be legal for it.
        switch = entry.kind == "int" and now in (0, 1) and 0 in (now, default, *listed)
        for value in dict.fromkeys((default, *listed, *((1 - now,) if switch else ()))):
            # The default is covered by omitting the attribute.
            covered = value in (None, now) or (value == default and name in given)
            if not covered and (name != "axis" or _is_axis(variant, value)):
                changed = with_attributes(variant, {name: make_attribute(name, value, entry.kind)})
                yield described(Substitution(f"{name}={value_text(value)}", before), changed)

    simple = (each for each in operator.attributes.items() if each[0] not in TYPE_ATTRIBUTES and each[1].kind in SIMPLE)
    return filter(None, chain.from_iterable(zip_longest(*(values(*each) for each in simple))))


def _is_axis(variant: Variant, value: Any) -> bool:
    """Whether the first input has this axis; True if its rank is unknown."""
    feed = variant.feed(variant.node.input[0]) if variant.node.input else None
    rank = rank_of(feed.kind) if feed is not None else None
    return rank is None or (isinstance(value, int) and -rank <= value < rank)


def _value(attribute: onnx.AttributeProto | None) -> Any:
    """The value of an attribute as a hashable Python value; None without one."""
    return None if attribute is None else _hashable(onnx.helper.get_attribute_value(attribute))


def _hashable(value: Any) -> Any:
    """An attribute value as a hashable Python value."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return tuple(map(_hashable, value)) if several else value


def _attribute_text(attribute: onnx.AttributeProto) -> str:
    """An attribute with its value, as text."""
    value = _value(attribute)
    if not isinstance(value, int | float | str | tuple):
        return f"{attribute.name}=(a tensor or graph)"
    if isinstance(value, tuple) and len(value) > MOST_SHOWN:
        return f"{attribute.name}={len(value)} values"
    return f"{attribute.name}={value_text(value)}"
